"""The contents of the archive that TorchServe loads."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import yaml

from specserve.cli.archive import pack, prepared_document, prepared_handler
from specserve.engine import kernel_library
from specserve.errors import ConfigError
from specserve.weights import files

DOCUMENT = {"minWorkers": 1, "handler": {"model_id": "m"}}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model YAML, beside its weights."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.gguf").write_bytes(b"weights")
    path = tmp_path / "model.yaml"
    speculation = {"gamma": 2, "corpus": ["docs.txt", "/srv/docs.txt", "~/docs.txt"]}
    handler = {"model_id": "m", "target": {"path": "mine.gguf"}, "trace": "traces", "speculation": speculation}
    handler["models_directory"] = "models"
    path.write_text(yaml.safe_dump({"batchSize": 12, "continuousBatching": True, "handler": handler}))
    return path


def test_the_archives_yaml_has_absolute_paths_of_the_operators_files_and_checksums(config: Path) -> None:
    here = config.parent
    expected = yaml.safe_load(config.read_text())
    corpus = [str(here / "docs.txt"), "/srv/docs.txt", str(Path("~/docs.txt").expanduser())]
    target = {"path": str(here / "mine.gguf"), "sha256": hashlib.sha256(b"weights").hexdigest()}
    speculation = {"gamma": 2, "corpus": corpus}
    expected["handler"] |= {"target": target, "trace": str(here / "traces"), "speculation": speculation}
    expected["handler"]["models_directory"] = str(here / "models")
    assert prepared_document(config) == expected
    assert prepared_handler(config).trace == here / "traces"


def test_the_archives_yaml_names_what_the_models_directory_has_and_where_it_comes_from(config: Path) -> None:
    document, weights = yaml.safe_load(config.read_text()), files.models_directory() / "weights.gguf"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"others")
    source = {"hub": "someone/some-GGUF/weights.gguf", "sha256": hashlib.sha256(b"others").hexdigest()}
    document["handler"]["target"] = source
    config.write_text(yaml.safe_dump(document))
    target = {"path": "weights.gguf", "sha256": source["sha256"], "source": source}
    assert prepared_document(config)["handler"]["target"] == target
    assert prepared_handler(config).target.path == weights


def test_an_archive_holds_the_handler_the_package_and_the_yaml_and_is_replaced(tmp_path: Path) -> None:
    store = tmp_path / "model_store"
    for _ in range(2):
        written = pack(DOCUMENT, store / "mine.mar", "mine", "2.0")
    assert list(store.iterdir()) == [written] == [store / "mine.mar"]
    with zipfile.ZipFile(written) as content:
        names = set(content.namelist())
        assert yaml.safe_load(content.read("model.yaml")) == DOCUMENT
        manifest = json.loads(content.read("MAR-INF/MANIFEST.json"))
    assert {"speculative_handler.py", "torch.py", "specserve/config.py", "specserve/engine/llama.py"} < names
    assert f"specserve/engine/{kernel_library.FILE}" in names
    assert not [name for name in names if "/cli/" in name or "__pycache__" in name or "gguf" in name]
    files = {"handler": "speculative_handler.py", "configFile": "model.yaml"}
    assert manifest["model"] == {"modelName": "mine", "modelVersion": "2.0"} | files


def test_a_name_or_version_that_cannot_be_part_of_a_url_is_refused(tmp_path: Path) -> None:
    for names, sentence in ((("a b", "1.0"), "--name 'a b': may hold"), (("a", "1/0"), "--version '1/0': may hold")):
        with pytest.raises(ConfigError, match=sentence):
            pack(DOCUMENT, tmp_path / "a.mar", *names)
