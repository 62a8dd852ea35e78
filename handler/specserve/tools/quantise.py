"""Requantise one GGUF to pure Q4_0, in a process of its own: `python -m specserve.tools.quantise`.

A process of its own can be interrupted at once, and what the library prints does not reach the terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specserve.engine.llama_model import write_pure_q4_0


def main(source: str, target: str) -> int:
    """Write `target`: every tensor of `source` as Q4_0; returns 0, or 1 when the library refuses."""
    return 0 if write_pure_q4_0(Path(source), Path(target)) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
