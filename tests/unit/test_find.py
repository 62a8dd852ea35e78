"""An archive's model files are found by their names, on the machine that it is registered on."""

import hashlib
from pathlib import Path

import pytest

from specserve.config import HandlerConfig, ModelConfig
from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.weights import models
from specserve.weights.find import find

WEIGHTS, OTHERS = b"weights", b"other weights"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPECSERVE_MODELS", raising=False)
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(content: bytes, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.gguf").write_bytes(content)
    return directory / "model.gguf"


def found(path: Path | str = "model.gguf", **keys: object) -> Path:
    source = {"hub": "someone/some-GGUF/model.gguf", "sha256": "0" * 64, "requantise": "q4_0"}
    target = {"path": path, "sha256": SHA256, "source": source}
    config = HandlerConfig.model_validate({"model_id": "m", "target": target, **keys})
    return find(config.target, config)


def test_the_first_file_of_the_name_and_checksum_is_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its path leads, in `models_directory`, in $SPECSERVE_MODELS, or without that in the cache's directory."""
    in_cache = put(WEIGHTS, cache / "models")
    assert found() == found("/home/builder/model.gguf") == in_cache
    own, named, built = (put(WEIGHTS, tmp_path / name) for name in ("own", "named", "built"))
    monkeypatch.setenv("SPECSERVE_MODELS", str(own.parent))
    assert found() == own
    assert found(models_directory=named.parent) == named
    assert found(built, models_directory=named.parent) == built
    put(OTHERS, built.parent)
    put(OTHERS, named.parent)
    assert found(built, models_directory=named.parent) == own


def test_a_missing_file_is_a_sentence_with_the_places_and_what_helps(tmp_path: Path, cache: Path) -> None:
    wrong = put(OTHERS, tmp_path / "named")
    with pytest.raises(ModelLoadError) as error:
        found(models_directory=wrong.parent)
    assert str(error.value) == (
        f"model.gguf: there is no such model file in {wrong.parent}, {cache}/models. {wrong} has another sha256 than "
        "the archive says: if it should, run scripts/archive again. Put it there, or name its directory in "
        "$SPECSERVE_MODELS, or set `fetch_models: true`."
    )


def test_a_missing_file_is_fetched_where_the_operator_allows_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the place that the archive says, and requantised as in the configuration that it was built with."""
    fetched = []

    def fetch(source: ModelConfig, _: Path) -> Path:
        fetched.append(source.hub)
        return put(OTHERS, cache / "models")

    monkeypatch.setattr(models, "fetch", fetch)
    monkeypatch.setattr(models, "requantise", lambda _: put(WEIGHTS, tmp_path / "requantised"))
    with pytest.raises(ModelLoadError):
        found()
    assert not fetched
    assert found(fetch_models=True) == tmp_path / "requantised" / "model.gguf"
    assert fetched == ["someone/some-GGUF/model.gguf"]

    def unreachable(*_: object) -> Path:
        raise EnvironmentFailure("the hub cannot be reached")

    monkeypatch.setattr(models, "fetch", unreachable)
    with pytest.raises(ModelLoadError, match="cannot be fetched: the hub cannot be reached"):
        found(fetch_models=True)
