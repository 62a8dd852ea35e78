"""The model YAML: what an operator writes by hand, and the sentences about what is wrong with it."""

from pathlib import Path

import pytest
import yaml

from specserve.cli import paths
from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig, load_yaml
from specserve.errors import ConfigError

YAML = """
continuousBatching: true
handler:
  model_id: m
  target: {path: m.gguf}
"""


def read(directory: Path, text: str) -> HandlerConfig:
    file = directory / "model.yaml"
    file.write_text(text, encoding="utf-8")
    return load_yaml(file)[1]


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    # YAML reads a bare off as false.
    handler = read(tmp_path, YAML + "  kernels: off\n  speculation: {mode: off}\n")
    assert (handler.kernels, handler.speculation.mode) == ("off", "off")


def test_what_is_wrong_is_said_in_a_sentence_that_names_the_file_and_the_key(tmp_path: Path) -> None:
    for text, sentence in (
        (YAML + "  sequnces: 4", "`handler.sequnces`: there is no such key. Did you mean `sequences`?"),
        (YAML + "  zzz: 4", "`handler.zzz`: there is no such key."),
        (YAML + "  speculation: {mod: off}", "`handler.speculation.mod`: there is no such key. Did you mean `mode`?"),
        (YAML + "  speculation: {mode: on}", "`handler.speculation.mode`: Input should be 'auto', 'fixed' or 'off'."),
        (YAML + "  speculation: {gamma: 9, max_gamma: 8}", "`handler.speculation`: `gamma` may not be larger than"),
        (YAML + "  context_length: 4096\n  cache_tokens: 1024", "`handler`: `cache_tokens` may not be less than"),
        (YAML + "  draft: {sha256: 12}", "`handler.draft.sha256`: "),
        (YAML + "  draft: {}", "`handler.draft`: give either `path` (a GGUF file) or `hub`"),
        (YAML + "  draft: {hub: weights.gguf}", "`handler.draft.hub`: String should match pattern"),
        (YAML + "maxWorkers: 2", "`maxWorkers`: Input should be 0 or 1."),
        (YAML + "startupTimeout: 10m", "`startupTimeout`: Input should be a valid integer."),
        (YAML.replace("continuousBatching: true", ""), "`continuousBatching`: Field required."),
        (YAML.replace("true", "false"), "`continuousBatching`: Input should be True."),
        ("continuousBatching: true", "there is no `handler:` section; config/smollm2-135m.yaml is a short example."),
        ("handler", "is not a mapping of keys"),
        ("a: b: c", "is not valid YAML"),
    ):
        with pytest.raises(ConfigError) as refusal:
            read(tmp_path, text)
        assert str(refusal.value).startswith(f"{tmp_path / 'model.yaml'}: {sentence}")


def test_the_projects_configurations_can_be_served_and_have_no_control_group() -> None:
    """With a control group some answers would be slower than they have to be."""
    for path in paths.CONFIG.glob("*.yaml"):
        document, handler = load_yaml(path)
        assert document["batchSize"] > handler.sequences
        assert document["maxBatchDelay"] == 1
        assert handler.speculation.holdback == 0


def test_the_default_configuration_names_every_key() -> None:
    lines = {line.strip("# ").partition(":")[0] for line in paths.DEFAULT_CONFIG.read_text().splitlines()}
    keys = {key for section in (HandlerConfig, ModelConfig, SpeculationConfig) for key in section.model_fields}
    assert keys - lines == {"source"}, "scripts/archive writes it"
    assert yaml.safe_load(paths.DEFAULT_CONFIG.read_text())["handler"].keys() < keys
