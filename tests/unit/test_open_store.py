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
    return SimpleNamespace(target=SimpleNamespace(token_bytes=token_bytes))


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


def test_none_are_kept_without_memory_or_where_none_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store(config(prefix_cache_mib=0), models()) is None
    assert open_store(config(prefix_cache_mib=64), models(token_bytes=None)) is None
    monkeypatch.setattr(loading, "free_memory", lambda: 0)
    assert open_store(config(), models()) is None
