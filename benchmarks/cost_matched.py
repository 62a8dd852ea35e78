"""Makes the "cost-matched 3B": the text of the default target, 1.5B, at what a forward of Qwen2.5-3B costs.

Identity blocks are appended until a forward reads as many bytes of weights as the 3B's: copies of the last block whose
attn_output and ffn_down are zero, so that they cost what a block costs and change nothing. It stands in for 3B weights
that cannot be had; its times are the 3B's, its text and its acceptance are the 1.5B's, and it must be labelled so.
Then greedy text and times are compared with the 1.5B's.

    .venv/bin/python benchmarks/cost_matched.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from rich.console import Console

from decode import read_tasks
from machine import describe_machine
from quiet import undisturbed
from specserve.config import usable_cores
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.tools import files, paths
from specserve.tools.models import prepare

SILENT = ("attn_output", "ffn_down")  # whose output is what a block adds to the stream
BYTES_OF_Q4_0, WEIGHTS_OF_Q4_0 = 18, 32
PROMPT_TOKENS, TOKENS, TIMES = 128, 64, 9


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5 by its dimensions."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a forward reads when every matrix is Q4_0; biases and norms are F32."""
        keys = self.hidden // self.heads * self.kv_heads
        matrices = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.feed_forward
        vectors = 3 * self.hidden + 2 * keys
        weights = self.layers * matrices + self.vocabulary * self.hidden
        return weights * BYTES_OF_Q4_0 // WEIGHTS_OF_Q4_0 + 4 * (self.layers * vectors + self.hidden)


QWEN_3B = Shape(layers=36, hidden=2048, feed_forward=11008, heads=16, kv_heads=2, vocabulary=151936)


@dataclass(frozen=True)
class Plan:
    """How many blocks are appended, and the bytes that a forward then reads."""

    layers: int
    blocks: int
    bytes_source: int
    bytes_result: int


def plan(source: GGUFReader) -> Plan:
    """Append as many blocks as bring the bytes that a forward reads nearest to the 3B's."""
    layers = int(source.fields["qwen2.block_count"].contents())
    # Of the embedding a forward reads a row a token, unless it is the output layer as well.
    output = "output.weight" if any(t.name == "output.weight" for t in source.tensors) else "token_embd.weight"
    once = sum(int(t.n_bytes) for t in source.tensors if t.name in (output, "output_norm.weight"))
    block = sum(int(t.n_bytes) for t in _block(source, layers - 1))
    before = once + layers * block
    blocks = round((QWEN_3B.bytes_read - before) / block)
    return Plan(layers, blocks, before, before + blocks * block)


def _block(source: GGUFReader, layer: int) -> list[ReaderTensor]:
    return [tensor for tensor in source.tensors if tensor.name.startswith(f"blk.{layer}.")]


def make(source: Path) -> tuple[Path, Plan]:
    """Write the file into the models directory unless it is there; returns its path and what is in it."""
    models = paths.models_directory()
    path = models / f"{source.stem}.cost-matched-3b.gguf"
    note = path.with_name(f".{path.name}.json")
    reader = GGUFReader(source)
    planned = plan(reader)
    facts = {"source_sha256": files.hashed(source).sha256, "blocks": planned.blocks}
    with files.locked(models / f".{path.name}.lock", f"{path.name} is being written"):
        if not path.is_file() or files.read_json(note) != facts:
            partial = path.with_name(path.name + ".partial")
            files.require_space(models, 2 * planned.bytes_result, path.name)
            try:
                with files.full_disk_explained(models, f"writing {path.name}"):
                    _write(reader, planned, partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            files.write_json(note, facts)
    return path, planned


def _write(source: GGUFReader, planned: Plan, path: Path) -> None:
    """Copy metadata and tensors, one at a time, and append the identity blocks."""
    writer = GGUFWriter(path, "qwen2")
    changed = {
        "qwen2.block_count": planned.layers + planned.blocks,
        "general.name": "Qwen2.5 Coder 1.5B Instruct at the cost of Qwen2.5 3B, by identity blocks",
    }
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, field.contents()), kind, sub_type=inner)
    for name, tensor in _tensors(source, planned):
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(source, planned):
        silent = name != tensor.name and any(part in name for part in SILENT)
        # In Q4_0 as in F32, bytes of zero are weights of zero.
        writer.write_tensor_data(np.zeros_like(tensor.data) if silent else tensor.data)
    writer.close()


def _tensors(source: GGUFReader, planned: Plan) -> Iterator[tuple[str, ReaderTensor]]:
    """Every tensor of the result by name, and the one it is made from."""
    last = planned.layers - 1
    added = (
        (tensor.name.replace(f"blk.{last}.", f"blk.{planned.layers + n}."), tensor)
        for n in range(planned.blocks)
        for tensor in _block(source, last)
    )
    return chain(((tensor.name, tensor) for tensor in source.tensors), added)


def engine(model: LlamaModel) -> LlamaEngine:
    """One slot, as the server would run it."""
    return LlamaEngine(
        model, n_slots=1, context_length=1024, threads=usable_cores(), max_rows=PROMPT_TOKENS, max_logits=4
    )


def greedy(target: LlamaEngine, prompt: list[int]) -> list[int]:
    """The most likely continuation of a prompt, in an empty cache."""
    target.truncate(0, 0)
    last = len(prompt) - 1
    rows = [Row(token, 0, place, wants_logits=place == last) for place, token in enumerate(prompt)]
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        [logits] = target.forward(rows)
        tokens.append(int(logits.argmax()))
        rows = [Row(tokens[-1], 0, last + len(tokens), wants_logits=True)]
    return tokens


def milliseconds(target: LlamaEngine, rows: int) -> float:
    """One forward of so many rows behind a short text."""
    start = PROMPT_TOKENS
    begun = perf_counter()
    target.forward([Row(0, 0, start + row, wants_logits=True) for row in range(rows)])
    taken = 1000 * (perf_counter() - begun)
    target.truncate(0, start)
    return taken


def in_turn(engines: list[LlamaEngine], rows: int) -> list[list[float]]:
    """Milliseconds of each, one after the other, so that a drift of the machine meets both alike."""
    return [[milliseconds(one, rows) for one in engines] for _ in range(TIMES)]


def compare(source: Path, matched: Path) -> list[dict[str, Any]]:
    """Whether both say the same, and what a forward of 1 and of 4 rows takes."""
    model = LlamaModel(source)
    engines = [engine(model), engine(LlamaModel(matched))]
    prompts = (model.encode(task.text, special=True)[:PROMPT_TOKENS] for task in read_tasks("code", 2))
    texts = [[greedy(one, prompt) for one in engines] for prompt in prompts]
    for one in engines:
        one.truncate(0, 0)
        one.forward([Row(0, 0, place, wants_logits=False) for place in range(PROMPT_TOKENS)])
    rows: list[dict[str, Any]] = [{"prompts": len(texts), "same_text": sum(a == b for a, b in texts)}]
    for count in (1, 4):
        pairs, others = undisturbed(partial(in_turn, engines, count))
        before, after = (median(pair[which] for pair in pairs) for which in (0, 1))
        times = {"milliseconds_1.5b": round(before, 1), "milliseconds": round(after, 1)}
        ratio = median(pair[1] / pair[0] for pair in pairs)
        rows.append({"rows": count, **times, "ratio": round(ratio, 3), "others": round(others, 3)})
    return rows


def main() -> None:
    """Make the file, compare it with its source, and print one JSON object."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    source = prepare(paths.DEFAULT_CONFIG).target
    with Console(stderr=True).status("writing and comparing"):
        matched, planned = make(source)
        rows = compare(source, matched)
    reads = {"1.5b": planned.bytes_source, "matched": planned.bytes_result, "3b": QWEN_3B.bytes_read}
    for what, count in reads.items():
        print(f"a forward of {what:8} reads {count / 1e6:7.1f} MB of weights")
    print(f"{planned.layers} blocks and {planned.blocks} identity blocks: {matched.name}")
    ratio = planned.bytes_result / planned.bytes_source
    result = {"benchmark": "cost_matched", "machine": describe_machine(), "models": {"target": matched.name}}
    notes = [
        f"identity blocks: {planned.blocks}; a forward reads {ratio:.3f} times the bytes of the 1.5B",
        f"keys and values of {planned.layers + planned.blocks} layers, where the 3B has {QWEN_3B.layers} of that width",
        "others: the share of a core that other processes used meanwhile",
    ]
    print(json.dumps({**result, "bytes_read": reads, "rows": rows, "notes": notes}))


if __name__ == "__main__":
    main()
