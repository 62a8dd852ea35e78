"""The model YAML: what an operator writes by hand, and the sentences about what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from specserve.config import HandlerConfig, load_yaml
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

HANDLER = """
handler:
  model_id: m
  target: {path: m.gguf}
"""


def read(directory: Path, lines: str) -> HandlerConfig:
    """The configuration that these lines below `handler:` make."""
    file = directory / "model.yaml"
    file.write_text(HANDLER + lines, encoding="utf-8")
    return load_yaml(file)[1]


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    # YAML reads a bare off as false.
    handler = read(tmp_path, "  kernels: off\n  speculation: {mode: off}\n")
    assert (handler.kernels, handler.speculation.mode) == ("off", "off")


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("  sequnces: 4\n", "`handler.sequnces`: there is no such key: did you mean `sequences`?"),
        ("  zzz: 4\n", "`handler.zzz`: there is no such key."),
        ("  speculation: {modus: off}\n", "`handler.speculation.modus`: there is no such key: did you mean `mode`?"),
        ("  speculation: {mode: on}\n", "`handler.speculation.mode`: Input should be 'auto', 'fixed' or 'off'."),
        (
            "  context_length: 4096\n  cache_tokens: 1024\n",
            "`handler`: `cache_tokens` may not be less than `context_length`.",
        ),
        (
            "  keep_prefixes: false\n  prefix_cache_mib: 64\n",
            "`handler`: without `keep_prefixes` there is nothing that `prefix_cache_mib` could keep.",
        ),
        (
            "  draft: {file: d.gguf, sources: [{hbu: a, file: b}]}\n",
            "`handler.draft.sources.0.hub`: Field required.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_that_names_the_file_and_the_key(
    tmp_path: Path, lines: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, lines)
    assert str(refusal.value) == f"{tmp_path / 'model.yaml'}: {sentence}"


def test_without_prefixes_a_store_of_none_may_be_said(tmp_path: Path) -> None:
    assert read(tmp_path, "  keep_prefixes: false\n  prefix_cache_mib: 0\n").prefix_cache_mib == 0
