"""Makes the "cost-matched 3B": a GGUF with the text of the default target (1.5B, pure Q4_0) and the cost of a 3B.

Copies of the last block are appended whose attn_output and ffn_down are zero, so that they cost what a block costs and
change nothing. The file stands in for 3B weights where these cannot be downloaded: its speed is the 3B's, its text and
its acceptance rates are the 1.5B's, and results must be labelled so. `decode.py --config benchmarks/cost_matched.yaml`
uses it.

    .venv/bin/python benchmarks/cost_matched.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor

from perplexity import forms_of_the_target
from specserve.weights.files import models_directory

# Blocks of the 1.5B, and those that bring the weights that a pass reads from 869 to 1,738 MB. Qwen2.5 3B in Q4_0 has
# 1,737 MB: 36 blocks of 2,048 by 11,008, 16 heads, 2 for keys and values, and 151,936 tokens.
LAYERS, ADDED = 28, 33
# The matrices whose products a block adds to the residual stream.
ZEROED = ("attn_output", "ffn_down")


def tensors(source: GGUFReader) -> Iterator[tuple[str, ReaderTensor]]:
    """Every tensor of the result by name, and the one it is made from."""
    yield from ((tensor.name, tensor) for tensor in source.tensors)
    last = f"blk.{LAYERS - 1}."
    for number in range(LAYERS, LAYERS + ADDED):
        block = (tensor for tensor in source.tensors if tensor.name.startswith(last))
        yield from ((tensor.name.replace(last, f"blk.{number}."), tensor) for tensor in block)


def write(source: GGUFReader, path: Path) -> None:
    """Copy metadata and tensors, one at a time, and append the blocks."""
    writer = GGUFWriter(path, "qwen2")
    changed = {
        "qwen2.block_count": LAYERS + ADDED,
        "general.name": "Qwen2.5 Coder 1.5B Instruct at the cost of Qwen2.5 3B, by identity blocks",
    }
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, field.contents()), kind, sub_type=inner)
    for name, tensor in tensors(source):
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors(source):
        zeroed = name != tensor.name and any(part in name for part in ZEROED)
        # In every format used here, bytes of zero are weights of zero.
        writer.write_tensor_data(np.zeros_like(tensor.data) if zeroed else tensor.data)
    writer.close()


def main() -> None:
    _, source = forms_of_the_target()
    path = models_directory() / f"{source.stem}.cost-matched-3b.gguf"
    partial = path.with_name(path.name + ".partial")
    write(GGUFReader(source), partial)
    partial.replace(path)
    print(path)


if __name__ == "__main__":
    main()
