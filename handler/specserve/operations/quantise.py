"""Requantise one GGUF to pure Q4_0, in a process of its own: `python -m specserve.operations.quantise`.

A process of its own can be interrupted at once, and what the library prints does not reach the terminal.
"""

from __future__ import annotations

import sys

import llama_cpp


def main(source: str, target: str) -> int:
    """Write `target`: every tensor of `source` as Q4_0; returns 0, or 1 when the library refuses."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.pure = True
    parameters.allow_requantize = True
    outcome = llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters)
    return 1 if outcome else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
