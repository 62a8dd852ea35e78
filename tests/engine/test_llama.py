"""The llama.cpp engine on tiny generated models of three architectures."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from pairs import TinyFiles
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import EngineError, ModelLoadError
from tiny_models import ARCHITECTURES

SLOTS = 3
CONTEXT = 256

TinyFile = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> TinyFile:
    """The path of a tiny model, written on first use."""
    return TinyFiles(tmp_path_factory.mktemp("tiny")).path


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_for(model: LlamaModel, **changes: int) -> LlamaEngine:
    """An engine with small buffers."""
    options: dict[str, Any] = {
        "n_slots": SLOTS,
        "context_length": CONTEXT,
        "threads": 1,
        "max_rows": 64,
        "max_logits": 32,
    }
    return LlamaEngine(model, **(options | changes))


@pytest.fixture(scope="module")
def model(architecture: str, tiny_file: TinyFile) -> LlamaModel:
    return LlamaModel(tiny_file(architecture, "target"))


@pytest.fixture
def engine(model: LlamaModel) -> Iterator[LlamaEngine]:
    engine = engine_for(model)
    yield engine
    engine.close()


def rows(tokens: list[int], *, slot: int = 0, start: int = 0, wants: str = "last") -> list[Row]:
    """Rows that feed `tokens` to a slot."""
    last = len(tokens) - 1
    return [Row(t, slot, start + i, wants == "all" or (wants == "last" and i == last)) for i, t in enumerate(tokens)]


def test_several_slots_in_one_pass_have_the_logits_of_separate_passes(engine: LlamaEngine) -> None:
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    alone = []
    for prompt in prompts:
        alone.append(engine.forward(rows(prompt)).copy())
        engine.truncate(0, 0)
    together = engine.forward([row for slot, prompt in enumerate(prompts) for row in rows(prompt, slot=slot)])
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)


def test_logits_after_truncate_do_not_depend_on_the_removed_tokens(engine: LlamaEngine) -> None:
    expected = engine.forward(rows([5, 6, 7, 8])).copy()
    engine.truncate(0, 2)
    engine.forward(rows([50, 51, 52], start=2))
    engine.truncate(0, 2)
    np.testing.assert_allclose(engine.forward(rows([7, 8], start=2)), expected, atol=1e-4)


def alternative(token: int, position: int, slot: int = 0) -> Row:
    return Row(token, slot, position, wants_logits=True, alternative=True)


@pytest.fixture
def branching(model: LlamaModel) -> Iterator[LlamaEngine]:
    """An engine that takes three alternatives."""
    engine = engine_for(model, max_alternatives=3)
    yield engine
    engine.close()


def test_an_alternative_has_the_logits_of_a_pass_in_which_it_follows(branching: LlamaEngine) -> None:
    """Alternatives of two slots, two of them at one position, beside drafts that they must not see."""
    expected = []
    for tokens in ([5, 6, 7, 8], [5, 6, 40], [5, 6, 7, 41], [5, 6, 7, 42], [9, 10], [9, 43]):
        expected.append(branching.forward(rows(tokens))[-1].copy())
        branching.truncate(0, 0)
    branching.forward(rows([5, 6]))
    found = branching.forward(
        [
            *rows([7, 8], start=2),
            *(alternative(token, position) for token, position in ((40, 2), (41, 3), (42, 3))),
            *rows([9, 10], slot=1),
        ]
    )
    np.testing.assert_allclose(found, expected[:5], atol=1e-4)
    branching.truncate(1, 0)
    found = branching.forward([*rows([9, 10], slot=1), alternative(43, 1, slot=1)])
    np.testing.assert_allclose(found, expected[4:], atol=1e-4)


def test_a_slot_goes_on_after_an_adopted_alternative(branching: LlamaEngine) -> None:
    """llama.cpp's attention adds in the order of cells, which is another one here: the logits differ a little."""
    for number, tokens in enumerate(([5, 40], [5, 6, 41])):
        logits = []
        for text in ([*tokens[:-1], 7, 11], [*tokens, 11]):
            logits.append(branching.forward(rows(text)).copy())
            branching.truncate(0, 0)
        other, expected = logits
        branching.forward(rows([5]))
        branching.forward([*rows([6, 7], start=1), alternative(40, 1), alternative(41, 2)])
        branching.adopt(0, number)
        assert branching.cached_len(0) == len(tokens)
        found = branching.forward(rows([11], start=len(tokens)))
        assert np.abs(found - expected).max() < 0.2 * np.abs(found - other).max()
        branching.truncate(0, 0)


def test_alternatives_that_are_not_adopted_leave_nothing_in_the_cache(branching: LlamaEngine) -> None:
    """Three hundred alternatives of passes, half of them without `truncate`, would fill the cache."""
    expected = branching.forward(rows([5, 6, 7])).copy()
    for trial in range(100):
        branching.truncate(0, 1)
        for _ in range(1 + trial % 2):
            first = branching.cached_len(0)
            branching.forward([*rows([6] * 8, start=first), *(alternative(40, first) for _ in range(3))])
    branching.truncate(0, 1)
    branching.copy(0, 1, 1)
    np.testing.assert_allclose(branching.forward(rows([6, 7], slot=1, start=1)), expected, atol=1e-4)


def test_an_alternative_without_a_row_at_its_position_is_refused(branching: LlamaEngine) -> None:
    branching.forward(rows([5, 6]))
    for position in (1, 3):
        with pytest.raises(EngineError, match="does not follow"):
            branching.forward([*rows([7], start=2), alternative(40, position)])
    with pytest.raises(EngineError, match="at most 3 alternatives"):
        branching.forward([*rows([7], start=2), *(alternative(40, 2) for _ in range(4))])
    assert branching.cached_len(0) == 2


def test_a_pass_that_is_not_possible_is_refused(engine: LlamaEngine) -> None:
    for refused, reason in (
        (rows([5], start=1), "does not follow"),
        (rows([5] * 65), "1 to 64 rows"),
        ([], "1 to 64 rows"),
        (rows([5] * 33, wants="all"), "at most 32"),
    ):
        with pytest.raises(EngineError, match=reason):
            engine.forward(refused)


def test_a_token_outside_the_vocabulary_fails_and_leaves_the_cache_unchanged(engine: LlamaEngine) -> None:
    expected = engine.forward(rows([5, 6, 7])).copy()
    engine.truncate(0, 2)
    with pytest.raises(EngineError, match="llama_decode"):
        engine.forward(rows([7, 10**6], start=2))
    np.testing.assert_allclose(engine.forward(rows([7], start=2)), expected, atol=1e-4)


def test_all_slots_can_be_filled_to_the_context_length(engine: LlamaEngine) -> None:
    for slot in range(SLOTS):
        for start in range(0, CONTEXT, 64):
            engine.forward(rows([5] * 64, slot=slot, start=start))
    engine.truncate(1, 100)
    assert engine.forward(rows([5], slot=1, start=100)).shape[0] == 1


def test_slots_share_the_cells_and_a_pass_beyond_them_changes_nothing(model: LlamaModel) -> None:
    engine = engine_for(model, n_cells=CONTEXT)
    try:
        assert (engine.n_cells, engine.slot_length) == (CONTEXT, CONTEXT)
        for start in range(0, CONTEXT - 64, 64):
            engine.forward(rows([5] * 64, start=start))
        engine.copy(0, 1, CONTEXT - 64)
        expected = engine.forward(rows([7] * 32, slot=1, start=CONTEXT - 64)).copy()
        with pytest.raises(EngineError, match="llama_decode"):
            engine.forward(rows([5] * 33, slot=2))
        assert [engine.cached_len(slot) for slot in range(SLOTS)] == [CONTEXT - 64, CONTEXT - 32, 0]
        engine.truncate(1, CONTEXT - 64)
        again = engine.forward(rows([7] * 32, slot=1, start=CONTEXT - 64))
        np.testing.assert_allclose(again, expected, atol=1e-4)
        engine.forward(rows([5] * 32, slot=2))
    finally:
        engine.close()


def test_the_file_says_what_a_token_takes_in_the_cache(model: LlamaModel, engine: LlamaEngine) -> None:
    def size(tokens: int) -> int:
        engine.truncate(0, 0)
        engine.forward(rows([5] * tokens))
        return int(llama_cpp.llama_state_seq_get_size(engine._context, 0))

    # In half precision; a state also has each token's position and sequences.
    assert 0 <= (size(60) - size(20)) / 40 - 2 * model.cell_values < 64


def test_an_unusable_file_is_a_one_line_error(tmp_path: Path, architecture: str, tiny_file: TinyFile) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.gguf: the model file cannot be read \(No such file"):
        LlamaModel(tmp_path / "nowhere.gguf")
    file, whole = tmp_path / "file.gguf", tiny_file(architecture, "target").read_bytes()
    for content, reason in (
        (b"<html>not found</html>", "is not a GGUF file"),
        *((whole[:length], "is it complete") for length in (4, 100, 20_000)),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=reason):
            LlamaModel(file)


LOAD = """
import os, sys
from pathlib import Path
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import SpecserveError
for file in sys.argv[1:]:
    if not os.fork():
        try:
            LlamaEngine(LlamaModel(Path(file)), n_slots=1, context_length=64, threads=1, max_rows=16, max_logits=4)
        except SpecserveError as error:
            print(f"a sentence: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_damaged_header_is_a_one_line_error_if_detected(
    tmp_path: Path, architecture: str, tiny_file: TinyFile
) -> None:
    """Or llama.cpp aborts the process, which scripts/serve reports (tests/unit/test_server_files.py)."""
    files = [tmp_path / f"damaged{seed}.gguf" for seed in range(12)]
    for seed, file in enumerate(files):
        data = bytearray(tiny_file(architecture, "target").read_bytes())
        end = data.index(b"token_embd.weight")
        rng = random.Random(seed)
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(4, end + 3000)] = rng.randrange(256)
        file.write_bytes(data)
    command = [sys.executable, "-c", LOAD, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    codes = [int(line) for line in outcome.stdout.split()]
    assert len(codes) == len(files), outcome.stderr
    assert set(codes) <= {0, 1, -signal.SIGABRT}
    assert "Traceback" not in outcome.stderr
    for file, code in zip(files, codes, strict=True):
        assert code != 1 or f"a sentence: {file}: " in outcome.stderr
