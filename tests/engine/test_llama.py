"""The llama.cpp engine on tiny generated models of three architectures."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

import tiny_models
from kernel_products import needs_kernels
from pairs import TinyFiles, open_engine
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import EngineError, ModelLoadError
from tiny_formats import tiny_model
from tiny_models import write_tensors

SLOTS = 3
CONTEXT = 256


@pytest.fixture(scope="module")
def model(architecture: str, files: TinyFiles) -> LlamaModel:
    return LlamaModel(files.path(architecture, "target"))


@pytest.fixture
def engine(model: LlamaModel) -> Iterator[LlamaEngine]:
    engine = open_engine(model, max_alternatives=3)
    yield engine
    engine.close()


def rows(tokens: list[int], *, slot: int = 0, start: int = 0, wants: str = "last") -> list[Row]:
    """Rows that feed `tokens` to a slot."""
    last = len(tokens) - 1
    return [Row(t, slot, start + i, wants == "all" or (wants == "last" and i == last)) for i, t in enumerate(tokens)]


def test_a_pass_that_is_not_possible_is_refused(engine: LlamaEngine) -> None:
    engine.forward(rows([5, 6]))
    alternatives = {at: Row(40, 0, at, wants_logits=True, alternative=True) for at in (1, 2, 3)}
    for refused, reason in (
        (rows([7], start=3), "does not follow"),
        (rows([5] * 65, start=2), "1 to 64 rows"),
        ([], "1 to 64 rows"),
        (rows([5] * 33, start=2, wants="all"), "at most 32"),
        ([*rows([7], start=2), alternatives[1]], "does not follow"),
        ([*rows([7], start=2), alternatives[3]], "does not follow"),
        ([*rows([7], start=2), *[alternatives[2]] * 4], "at most 3 alternatives"),
    ):
        with pytest.raises(EngineError, match=reason):
            engine.forward(refused)
    assert engine.cached_len(0) == 2


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
    engine = open_engine(model, n_cells=CONTEXT)
    assert (engine.n_cells, engine.slot_length) == (CONTEXT, CONTEXT)
    for start in range(0, CONTEXT - 64, 64):
        engine.forward(rows([5] * 64, start=start))
    engine.copy(0, 1, CONTEXT - 64)
    expected = engine.forward(rows([7] * 32, slot=1, start=CONTEXT - 64)).copy()
    with pytest.raises(EngineError, match="llama_decode"):
        engine.forward(rows([5] * 33, slot=2))
    assert [engine.cached_len(slot) for slot in range(SLOTS)] == [CONTEXT - 64, CONTEXT - 32, 0]
    engine.truncate(1, CONTEXT - 64)
    np.testing.assert_allclose(engine.forward(rows([7] * 32, slot=1, start=CONTEXT - 64)), expected, atol=1e-4)
    engine.forward(rows([5] * 32, slot=2))
    engine.close()


def test_the_file_says_what_a_token_takes_in_the_cache(model: LlamaModel, engine: LlamaEngine) -> None:
    def size(tokens: int) -> int:
        engine.truncate(0, 0)
        engine.forward(rows([5] * tokens))
        return int(llama_cpp.llama_state_seq_get_size(engine._context, 0))

    # In half precision; a state also has each token's position and sequences, and nothing before the window.
    assert 0 <= (size(14) - size(4)) / 10 - 2 * model.cell_values < 64


def without_tensors(directory: Path, architecture: str, kind: str) -> bytes:
    writer = GGUFWriter(directory / "empty.gguf", architecture)
    writer.add_type(kind)
    write_tensors(writer, {})
    return (directory / "empty.gguf").read_bytes()


def test_an_unusable_file_is_a_one_line_error(tmp_path: Path, architecture: str, files: TinyFiles) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.gguf: the model file cannot be read \(No such file"):
        LlamaModel(tmp_path / "nowhere.gguf")
    file, whole = tmp_path / "file.gguf", files.path(architecture, "target").read_bytes()
    for content, reason in (
        (b"<html>not found</html>", "is not a GGUF file"),
        (
            whole[:100],
            r"cannot load this GGUF \(.+\); if it is incomplete, fetch it again",
        ),
        (
            whole[:-1000],
            r"cannot load this GGUF \(tensor '.*' data is not within the file bounds, .* incomplete\); if it",
        ),
        (whole.replace(architecture.encode(), b"x" * len(architecture)), "unknown model architecture: 'xxx"),
        (without_tensors(tmp_path, architecture, "adapter"), "is a LoRA adapter, not a model; point `path`"),
        (without_tensors(tmp_path, architecture, "imatrix"), "is an importance matrix, not a model; point `path`"),
        (
            without_tensors(tmp_path, architecture, "mmproj"),
            "is the part of a model that reads images; point `path` at",
        ),
        (without_tensors(tmp_path, "clip", "model"), "is the part of a model that reads images; point `path` at"),
        (without_tensors(tmp_path, "t5", "model"), r"\(error loading model .*\); if it is incomplete, fetch it again"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=reason):
            LlamaModel(file)


@pytest.mark.parametrize("length", [0, 1, 63, 2**32 - 1])
def test_a_model_trained_for_hardly_any_tokens_is_refused(length: int, tmp_path: Path) -> None:
    """As llama.cpp reads it, 2**32 - 1 is -1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "CONTEXT", length)
        tiny_models.write_tiny(tmp_path / "file.gguf", "qwen2", "target")
    with pytest.raises(ModelLoadError, match=rf"file\.gguf: was trained for {length} tokens, by its metadata; convert"):
        LlamaModel(tmp_path / "file.gguf")


def test_a_vocabulary_that_cannot_spell_every_text_is_refused(files: TinyFiles, tmp_path: Path) -> None:
    """A client's text would end the process."""
    whole = files.path("llama", "target").read_bytes()
    (tmp_path / "file.gguf").write_bytes(whole.replace(b"<0xC3>", b"<OxC3>"))
    with pytest.raises(ModelLoadError, match=r"file\.gguf: its vocabulary has no <0xC3>, so it cannot read all texts"):
        LlamaModel(tmp_path / "file.gguf")


def test_weights_that_give_no_logits_are_refused(files: TinyFiles, tmp_path: Path) -> None:
    """As those of a download that left a part out may do: scales that are no numbers, or zeros throughout."""
    whole = files.path("llama", "target").read_bytes()
    weights = whole.rindex(b"weight") + 100
    for byte in (b"\xff", b"\0"):
        (tmp_path / "file.gguf").write_bytes(whole[:weights] + byte * (len(whole) - weights))
        with pytest.raises(ModelLoadError, match=r"file.gguf: its logits are all equal, or no numbers"):
            open_engine(tmp_path / "file.gguf")


LOAD = """
import os, sys
from pathlib import Path
from pairs import KERNELS
from specserve.engine import kernels
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import SpecserveError
kernels.use(KERNELS)
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


def load(*files: Path) -> subprocess.CompletedProcess[str]:
    """Load each file in a process of its own and print how that ended."""
    command = [sys.executable, "-c", LOAD, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@needs_kernels
def test_a_matrix_of_a_type_without_products_is_a_one_line_error(tmp_path: Path) -> None:
    """llama.cpp would call the product that it has not."""
    file = tiny_model(tmp_path, "f32")
    content = bytearray(file.read_bytes())
    # Behind the name come the number of dimensions and two of them, then the type.
    place = content.index(b"blk.1.ffn_down.weight") + len("blk.1.ffn_down.weight") + 4 + 2 * 8
    assert content[place] == GGMLQuantizationType.F32
    content[place] = GGMLQuantizationType.I32
    file.write_bytes(content)
    outcome = load(file)
    assert outcome.stdout.split() == ["3"]
    assert outcome.stderr.startswith(f"specserve cannot load: {file}: llama.cpp cannot load this GGUF (")
    assert "blk.1.ffn_down.weight is of type i32, which has no product); if it is" in outcome.stderr


def test_a_damaged_header_is_a_one_line_error_if_detected(tmp_path: Path, architecture: str, files: TinyFiles) -> None:
    """Also where llama.cpp aborts the process, as it does for a model without layers."""
    damaged = [tmp_path / f"damaged{seed}.gguf" for seed in range(13)]
    for seed, file in enumerate(damaged):
        data = bytearray(files.path(architecture, "target").read_bytes())
        end = data.index(b"token_embd.weight")
        rng = random.Random(seed)
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(4, end + 3000)] = rng.randrange(256)
        file.write_bytes(data)
    layers = b"block_count\x04\0\0\0"
    file.write_bytes(files.path(architecture, "target").read_bytes().replace(layers + b"\2", layers + b"\0"))
    outcome = load(*damaged)
    codes = [int(line) for line in outcome.stdout.split()]
    assert len(codes) == len(damaged), outcome.stderr
    assert set(codes) <= {0, 1, 3}
    assert codes[-1] == 3
    assert "Traceback" not in outcome.stderr
    for file, code in zip(damaged, codes, strict=True):
        said = {0: "", 1: f"a sentence: {file}: ", 3: f"specserve cannot load: {file}: llama.cpp cannot load this GGUF"}
        assert said[code] in outcome.stderr
