"""How much the KV caches and the store of prefixes hold: what the operator writes, the model can use, and is free."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from specserve.config import HandlerConfig, parse_handler
from specserve.core import loading
from specserve.core.loading import open_store
from specserve.core.memory import check_weights, fitted, loaded_bytes
from specserve.errors import ModelLoadError

GIB = 2**30
MODELS = {"model_id": "m", "target": {"path": "t.gguf"}}
# Of Qwen2.5-Coder 1.5B and 0.5B: 28,672 and 12,288 bytes a token in half precision, and 1/32 of that for scales.
CODER = SimpleNamespace(path=Path("t.gguf"), trained_context=32768, cell_values=28 * 2 * 256, recurrent=False)
CELL = 28672 + 28672 // 32
SMALL: Any = SimpleNamespace(path=Path("d.gguf"), trained_context=32768, cell_values=24 * 2 * 128)


def config(**keys: Any) -> HandlerConfig:
    return parse_handler({**MODELS, **keys}, "my.yaml")


def served(free: int = 8 * GIB, *, trained: int = 32768, **keys: Any) -> tuple[int, int]:
    """The numbers of tokens that are served, of a sequence and of all."""
    target: Any = SimpleNamespace(**{**vars(CODER), "trained_context": trained})
    fit = fitted(config(**keys), target, SMALL if "draft" in keys else None, free)
    return fit.context_length, fit.cache_tokens


def test_a_sequence_has_at_most_what_the_model_and_the_cache_have() -> None:
    cases: list[tuple[dict[str, Any], int, tuple[int, int]]] = [
        ({}, 32768, (32768, 32768)),
        ({}, 131072, (32768, 32768)),
        ({}, 8192, (8192, 32768)),
        ({"context_length": 65536}, 131072, (65536, 65536)),
        ({"context_length": 4096}, 32768, (4096, 32768)),
        ({"cache_tokens": 16384}, 32768, (16384, 16384)),
        ({"cache_tokens": 65536}, 131072, (32768, 65536)),
        ({"context_length": 4096, "cache_tokens": 8192}, 32768, (4096, 8192)),
        # No more than all sequences can hold.
        ({"context_length": 1024, "sequences": 2}, 32768, (1024, 2048)),
    ]
    for keys, trained, expected in cases:
        assert served(trained=trained, **keys) == expected, keys


def test_a_context_beyond_the_models_training_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="was trained for 8192 tokens; lower `context_length` from 9000"):
        served(trained=8192, context_length=9000)


def test_with_less_memory_the_cache_holds_less_and_the_start_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context_length, cache_tokens = served(GIB)
    # More would fit. A whole number of sixteenths is the same at the next start, with a little more or less memory.
    assert 20_480 < (GIB - 400 * 2**20) // CELL < 20_480 + 32_768 // 16
    assert context_length == cache_tokens == served(GIB + 2**20)[0] == served(GIB - 2**24)[0] == 20_480
    assert f"holds {cache_tokens} tokens instead of 32768, since only 1,024 MiB of memory are free" in caplog.text
    assert served(GIB, context_length=4096) == (4096, cache_tokens)
    with caplog.at_level(logging.INFO):
        served(draft={"path": "d.gguf"})
    assert "the KV cache of 32768 tokens takes 924 MiB, other caches 198 MiB; 8,192 MiB were free" in caplog.text


def test_without_memory_for_one_useful_sequence_nothing_is_served() -> None:
    configured: list[tuple[dict[str, Any], int]] = [({}, 4096), ({"context_length": 20000}, 20000)]
    for keys, least in configured:
        enough = 400 * 2**20 + least * CELL
        assert served(enough, **keys)[1] == least
        with pytest.raises(ModelLoadError, match=rf"no memory for a KV cache of {least} tokens: it takes .* are free"):
            served(enough - 1, **keys)


def test_in_8_bits_more_tokens_fit() -> None:
    in_16_bits, in_8_bits = (served(GIB, cache_tokens=65536, cache_type=name)[1] for name in ("f16", "q8_0"))
    assert 1.7 * in_16_bits < in_8_bits < 1.9 * in_16_bits


def test_models_that_do_not_fit_into_memory_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    files = [tmp_path / "target.gguf", tmp_path / "draft.gguf"]
    for file in files:
        file.write_bytes(bytes(2**20))
    enough = 402 * 2**20
    check_weights(files, enough)
    for free, sentence in (
        (enough - 1, r"^target.gguf and draft.gguf: no memory: the weights take 2 MiB .* 400 MiB, but 402"),
        (enough - 2**20 - 1, r"^target.gguf: no memory: the weights take 1 MiB .* 400 MiB, but 401"),
    ):
        with pytest.raises(ModelLoadError, match=sentence):
            check_weights(files, free)


def test_of_a_model_in_several_files_all_count(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(bytes(2**20))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(bytes(2**20))
    for first, mib in (("m-00001-of-00003.gguf", 3), ("m-00001-of-00002.gguf", 1)):
        check_weights([tmp_path / first], (400 + mib) * 2**20)
        with pytest.raises(ModelLoadError, match=f"^{first}: no memory: the weights take {mib} MiB"):
            check_weights([tmp_path / first], (400 + mib) * 2**20 - 1)
        model: Any = SimpleNamespace(path=tmp_path / first, cell_values=0, recurrent=False)
        assert loaded_bytes(config(), model, None) == (400 + mib) * 2**20


def test_a_worker_takes_weights_kv_caches_and_a_rest(tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    file.write_bytes(bytes(2**20))
    model: Any = SimpleNamespace(path=file, cell_values=2**13, recurrent=False)
    cell = 2**13 * 33 // 16
    taken = loaded_bytes(config(context_length=64, cache_tokens=256, sequences=2), model, model)
    assert taken == (2 + 400) * 2**20 + (256 + 2 * 64) * cell


def test_prefixes_may_fill_a_gibibyte_a_quarter_of_what_is_free_or_what_is_configured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cases: list[tuple[int, int | None, dict[str, int], str]] = [
        (400 << 20, 28672, {}, "100 MiB of host memory keep prefixes: 3657 tokens"),
        (400 << 20, 28672, {"prefix_cache_mib": 64}, "64 MiB of host memory"),
        (8 << 30, 28672, {}, "1024 MiB of host memory"),
        (8 << 30, 28672, {"prefix_cache_mib": 3000}, "3000 MiB of host memory"),
        (0, 28672, {}, ""),
        (400 << 20, 28672, {"prefix_cache_mib": 0}, ""),
        (400 << 20, None, {"prefix_cache_mib": 64}, "no prefixes are kept in host memory: this model's keys"),
    ]
    for free, token_bytes, keys, sentence in cases:
        caplog.clear()
        models: Any = SimpleNamespace(target=SimpleNamespace(engine=SimpleNamespace(token_bytes=token_bytes)))
        with patch.object(loading, "free_memory", return_value=free), caplog.at_level("INFO"):
            open_store(config(**keys), models)
        assert sentence in caplog.text
        assert bool(sentence) == bool(caplog.text)
