"""The store of prefixes that a configuration asks for: its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specserve.config import HandlerConfig
from specserve.core import loading
from specserve.core.loading import open_store

MIB = 2**20


def config(**options: Any) -> HandlerConfig:
    return HandlerConfig.model_validate({"model_id": "m", "target": {"path": "m.gguf"}, **options})


def models(token_bytes: int | None = 28672) -> Any:
    return SimpleNamespace(target=SimpleNamespace(engine=SimpleNamespace(token_bytes=token_bytes)))


def test_prefixes_may_fill_a_quarter_of_what_is_available_or_what_the_operator_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 400 * MIB)
    with caplog.at_level("INFO"):
        open_store(config(), models())
        open_store(config(prefix_cache_mib=64), models())
    assert "100 MiB of host memory keep prefixes: 3657 tokens" in caplog.text
    assert "64 MiB of host memory" in caplog.text


def test_none_are_kept_without_memory_or_where_no_prefixes_are_kept_or_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 0)
    with caplog.at_level("INFO"):
        open_store(config(), models())
        open_store(config(prefix_cache_mib=0), models())
        open_store(config(prefix_cache_mib=64), models(token_bytes=None))
    assert not caplog.text
