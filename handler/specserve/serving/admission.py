"""How much room a sequence is promised in the KV cache when it is admitted; a function of its tokens."""

from __future__ import annotations

from specserve.sequence import Sequence

# Tokens of an answer that are promised at a time, so that a request which allows more is admitted before all are free:
# clients state thousands, or nothing, and get hundreds. An answer that has used them up is promised as many again;
# where there is no room, the sequence admitted last makes it (`Scheduler`). An assumption, which no command prints.
_ANSWER = 1024


def promised_cells(sequence: Sequence) -> int:
    """Number of cells that a sequence may fill, its prompt and what it has generated included.

    Args:
        sequence: its prompt and `max_tokens` fit into the cache together.
    """
    promises = sequence.generated // _ANSWER + 1
    return sequence.prompt_length + min(sequence.max_tokens, promises * _ANSWER)
