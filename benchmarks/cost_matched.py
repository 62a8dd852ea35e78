"""Makes the "cost-matched 3B": a GGUF with the text of the default target (1.5B, pure Q4_0) and the cost of a 3B.

Identity blocks are appended until a forward pass reads as many bytes of weights as the 3B's: copies of the last block
whose attn_output and ffn_down are zero, so that they cost what a block costs and change nothing. It stands in for 3B
weights where they cannot be downloaded: its speed is the 3B's, its text and its acceptance rates are the 1.5B's, and
results must be labelled so. Use it with `decode.py --config benchmarks/cost_matched.yaml`.

    .venv/bin/python benchmarks/cost_matched.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from rich.console import Console

from common import argument_parser, print_result, read_tasks
from perplexity import forms_of_the_target
from specserve.cli import files, paths
from specserve.cores import usable_cores
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel

# The matrices whose products a block adds to the residual stream.
ZEROED = ("attn_output", "ffn_down")
BYTES_OF_Q4_0, WEIGHTS_OF_Q4_0 = 18, 32
PROMPT_TOKENS, TOKENS = 128, 64


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen2.5 model."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a forward pass reads when every matrix is Q4_0; biases and norms are F32."""
        keys = self.hidden // self.heads * self.kv_heads
        matrices = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.feed_forward
        vectors = 3 * self.hidden + 2 * keys
        weights = self.layers * matrices + self.vocabulary * self.hidden
        return weights * BYTES_OF_Q4_0 // WEIGHTS_OF_Q4_0 + 4 * (self.layers * vectors + self.hidden)


QWEN_3B = Shape(layers=36, hidden=2048, feed_forward=11008, heads=16, kv_heads=2, vocabulary=151936)


@dataclass(frozen=True)
class Plan:
    """How many blocks the source has and gets, and the bytes that a forward pass reads before and after."""

    layers: int
    blocks: int
    bytes_source: int
    bytes_result: int


def plan(source: GGUFReader) -> Plan:
    """As many blocks as bring the bytes that a forward pass reads nearest to the 3B's."""
    layers = int(source.fields["qwen2.block_count"].contents())
    # A pass reads one row of the embedding a token, unless it is the output layer as well.
    output = "output.weight" if any(t.name == "output.weight" for t in source.tensors) else "token_embd.weight"
    once = sum(int(t.n_bytes) for t in source.tensors if t.name in (output, "output_norm.weight"))
    block = sum(int(t.n_bytes) for t in _block(source, layers - 1))
    before = once + layers * block
    blocks = round((QWEN_3B.bytes_read - before) / block)
    return Plan(layers, blocks, before, before + blocks * block)


def _block(source: GGUFReader, layer: int) -> list[ReaderTensor]:
    return [tensor for tensor in source.tensors if tensor.name.startswith(f"blk.{layer}.")]


def make(source: Path) -> tuple[Path, Plan]:
    """Write the file into the models directory unless it is there; returns its path and plan."""
    models = paths.models_directory()
    path = models / f"{source.stem}.cost-matched-3b.gguf"
    note = path.with_name(f".{path.name}.json")
    reader = GGUFReader(source)
    planned = plan(reader)
    facts = {"source_sha256": files.sha256(source), "blocks": planned.blocks}
    with files.locked(models / f".{path.name}.lock", f"{path.name} is being written"):
        if not path.is_file() or files.read_json(note) != facts:
            partial = path.with_name(path.name + ".partial")
            try:
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
        zeroed = name != tensor.name and any(part in name for part in ZEROED)
        # In every format used here, bytes of zero are weights of zero.
        writer.write_tensor_data(np.zeros_like(tensor.data) if zeroed else tensor.data)
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


def greedy(path: Path, prompts: list[str]) -> list[list[int]]:
    """The greedy continuation of each prompt."""
    model = LlamaModel(path)
    engine = LlamaEngine(
        model, n_slots=1, context_length=1024, threads=usable_cores().threads, max_rows=PROMPT_TOKENS, max_logits=4
    )
    answers = []
    for prompt in prompts:
        engine.truncate(0, 0)
        tokens = model.encode(prompt, special=True)[:PROMPT_TOKENS]
        last = len(tokens) - 1
        rows = [Row(token, 0, position, wants_logits=position == last) for position, token in enumerate(tokens)]
        answer: list[int] = []
        while len(answer) < TOKENS:
            [logits] = engine.forward(rows)
            answer.append(int(logits.argmax()))
            rows = [Row(answer[-1], 0, last + len(answer), wants_logits=True)]
        answers.append(answer)
    engine.close()
    model.close()
    return answers


def main() -> None:
    """Make the file, compare its greedy text with its source's, and print one JSON object."""
    parser = argument_parser(__doc__, quick="compare the text of one prompt instead of two", config=None)
    options = parser.parse_args()
    _, source = forms_of_the_target()
    prompts = [task.text for task in read_tasks("code", 1 if options.quick else 2)]
    with Console(stderr=True).status("writing and comparing"):
        matched, planned = make(source)
        same = sum(ours == other for ours, other in zip(greedy(source, prompts), greedy(matched, prompts), strict=True))
    reads = {"1.5b": planned.bytes_source, "cost_matched": planned.bytes_result, "3b": QWEN_3B.bytes_read}
    for what, count in reads.items():
        print(f"a forward pass of {what:12} reads {count / 1e6:7.1f} MB of weights")
    print(f"{planned.layers} blocks and {planned.blocks} identity blocks: {matched.name}")
    ratio = planned.bytes_result / planned.bytes_source
    notes = [
        f"identity blocks: {planned.blocks}; a pass reads {ratio:.3f} times the bytes of the 1.5B",
        f"keys and values of {planned.layers + planned.blocks} layers, where the 3B has {QWEN_3B.layers} of that width",
    ]
    rows = [{"prompts": len(prompts), "same_text": same}]
    print_result("cost_matched", {"target": matched.name}, rows, notes, bytes_read=reads)
    if same < len(prompts):
        raise SystemExit(f"{matched.name} does not write the text of {source.name}.")


if __name__ == "__main__":
    main()
