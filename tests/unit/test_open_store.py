"""The store of prefixes that a configuration asks for: its size, and what its files have to agree with."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.config import HandlerConfig
from specserve.engine import kernels
from specserve.serving import loading
from specserve.serving.loading import open_store

MIB = 2**20


def config(**options: Any) -> HandlerConfig:
    return HandlerConfig.model_validate({"model_id": "m", "target": {"path": "m.gguf"}, **options})


def models(path: Path = Path("m.gguf"), token_bytes: int | None = 28672) -> Any:
    return SimpleNamespace(target=SimpleNamespace(token_bytes=token_bytes), vocabulary=SimpleNamespace(path=path))


def test_by_default_prefixes_may_fill_a_quarter_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 400 * MIB)
    with caplog.at_level("INFO"):
        assert open_store(config(), models()) is not None
    assert "100 MiB of host memory keep prefixes: 3657 tokens" in caplog.text


def test_the_operator_may_say_how_much(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert open_store(config(prefix_cache_mib=64), models()) is not None
    assert "64 MiB" in caplog.text


def test_none_are_kept_without_memory_or_where_no_prefixes_are_kept_or_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store(config(prefix_cache_mib=0), models()) is None
    assert open_store(config(keep_prefixes=False), models()) is None
    assert open_store(config(prefix_cache_mib=64), models(token_bytes=None)) is None
    monkeypatch.setattr(loading, "free_memory", lambda: 0)
    assert open_store(config(), models()) is None


def test_a_directory_that_cannot_be_used_is_logged_and_memory_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"weights")
    (tmp_path / "file").write_text("")
    store = open_store(
        config(prefix_cache_mib=1, prefix_cache_directory=tmp_path / "file"), models(tmp_path / "m.gguf")
    )
    assert store is not None
    assert "prefix_cache_directory" in caplog.text


def test_files_are_used_only_by_the_same_model_code_and_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []

    def open_files(_: Path, identity: str) -> SimpleNamespace:
        opened.append(identity)
        return SimpleNamespace(read_into=lambda _: None)

    monkeypatch.setattr(loading, "PrefixFiles", open_files)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    options = {"prefix_cache_mib": 1, "prefix_cache_directory": tmp_path}

    def start(token_bytes: int = 8, **more: Any) -> None:
        open_store(config(**options, **more), models(path, token_bytes))

    start()
    # What follows changes no keys and no values.
    start(prefill_rows=7, max_tokens=9, speculation={"mode": "off"}, threads=1)
    assert len(set(opened)) == 1
    start(token_bytes=16)
    start(context_length=128)
    start(sequences=2)
    start(kernels="off")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "identity", lambda: "another library")
        start()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "build_description", lambda: "another llama.cpp")
        start()
    os.utime(path, ns=(1, 1))
    start()
    path.write_bytes(b"Weights")
    os.utime(path, ns=(1, 1))
    start()
    assert len(opened) == 10
    assert len(set(opened)) == 9
