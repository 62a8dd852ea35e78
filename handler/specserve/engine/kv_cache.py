"""What a model's KV cache holds, for target and draft model alike: the only record of the tokens.

Scheduler and draft model ask here which tokens a slot holds, how many a sequence still has to be fed, and which slot
holds the longest prefix of a text. An engine (engine/base.py) knows numbers of tokens only, and takes them from
llama.cpp; `KVCache.check` compares them.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, count, islice

import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import EngineError
from specserve.sequence import Owner, common_prefix

logger = logging.getLogger(__name__)


class KVCache:
    """The slots of one model's KV cache, and the passes that add tokens to them.

    A slot holds the tokens of a text from position `start` to `num_computed_tokens`, not included. A target's start is
    0. A draft model may begin later, and its engine counts positions from there: with `start` 744 the engine has token
    744 at position 0. All positions here are those of the text.

    All slots share `n_cells` cells of one token each. After a copy, both slots share the cells of their common prefix,
    and a shared cell counts once. The slots of running sequences are pinned; others may be emptied for their cells.
    Only this class adds tokens to the engine's cache, except to slots that are empty.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.n_slots, self.n_cells = engine.n_slots, engine.n_cells
        self._tokens: list[list[int]] = [[] for _ in range(self.n_slots)]
        self._start = [0] * self.n_slots
        # By slot, the cell of each token. A cell is only an identity here; its place in memory only the engine knows.
        self._held: list[list[int]] = [[] for _ in range(self.n_slots)]
        self._cells = count()
        # By cell, how many slots hold it, and how many of these are pinned; without those that none does.
        self._holders: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._pinned = [False] * self.n_slots
        self._owner: list[Owner] = [("", "")] * self.n_slots
        self._last_rows: list[Row] = []  # of the last pass, whose alternatives may be adopted

    @property
    def free_cells(self) -> int:
        return self.n_cells - len(self._holders)

    @property
    def pinned_cells(self) -> int:
        return len(self._pins)

    def pinned_without(self, slots: Collection[int]) -> int:
        """Number of cells that pinned slots would hold without these."""
        held = (self._held[slot] for slot in range(self.n_slots) if self._pinned[slot] and slot not in slots)
        return len(set(chain.from_iterable(held)))

    def pinned_before(self, slot: int, end: int) -> int:
        """How many of the tokens that a slot holds before position `end` are in cells of pinned slots."""
        held = self._held[slot]
        # These come before the others.
        most = min(end - self._start[slot], len(held))
        return bisect_left(held, 1, 0, most, key=lambda cell: cell not in self._pins)

    def is_pinned(self, slot: int) -> bool:
        return self._pinned[slot]

    def pin(self, slot: int) -> None:
        self._pinned[slot] = True
        self._pins.update(self._held[slot])

    def unpin(self, slot: int) -> None:
        self._pinned[slot] = False
        _remove(self._pins, self._held[slot])

    def start(self, slot: int) -> int:
        return self._start[slot]

    def num_computed_tokens(self, slot: int) -> int:
        return self._start[slot] + len(self._tokens[slot])

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def kv_len(self, slots: Iterable[int]) -> int:
        return self.engine.kv_len(slots)

    def claim(self, slot: int, owner: Owner) -> None:
        """Note whose tokens a slot holds from now on; it is emptied of another owner's."""
        if owner != self._owner[slot]:
            self.truncate(slot, 0)
            self._owner[slot] = owner

    def owner(self, slot: int) -> Owner:
        return self._owner[slot]

    def prefixes(self, owner: Owner, tokens: list[int], max_length: int) -> list[int]:
        return [self.prefix(slot, owner, tokens, max_length) for slot in range(self.n_slots)]

    def prefix(self, slot: int, owner: Owner, tokens: list[int], max_length: int) -> int:
        """How many leading tokens of an owner's text need no pass in a slot, counted up to `max_length`."""
        if owner != self._owner[slot]:
            return 0
        start, held = self._start[slot], self._tokens[slot]
        shared = common_prefix(held, tokens[start : start + len(held)] if start else tokens, max_length - start)
        return start + shared if shared and (self.engine.rollback is None or shared == len(held)) else 0

    def forward(self, rows: list[Row]) -> FloatArray:
        """Run a forward pass, whose rows the slots hold afterwards; see `Engine.forward`."""
        added = sum(not row.alternative for row in rows)
        if added > self.free_cells:
            raise EngineError(
                f"A pass of {added} tokens does not fit into {self.free_cells} free cells of the KV cache."
            )
        shifted = rows
        if any(self._start):
            shifted = [row._replace(position=row.position - self._start[row.slot]) for row in rows]
        logits = self.engine.forward(shifted)
        self._last_rows = rows
        for row in rows:
            if not row.alternative:
                self._append(row.slot, [row.token])
        return logits

    def truncate(self, slot: int, end: int) -> None:
        """Remove a slot's tokens from position `end` on, or all if the engine cannot, and its alternatives."""
        kept = max(0, end - self._start[slot])
        self.engine.truncate(slot, kept)
        self._drop(slot, min(kept, self.engine.cached_len(slot)))
        if not self._tokens[slot]:
            self._start[slot] = 0

    def restart(self, slot: int, start: int) -> None:
        """Empty a slot; the next token that it is fed is the one at position `start`."""
        self.truncate(slot, 0)
        self._start[slot] = start

    def copy(self, source: int, destination: int, end: int) -> None:
        """Replace what a slot holds by what another one holds before position `end`, without computing it."""
        self.engine.copy(source, destination, end - self._start[source])
        self._drop(destination, 0)
        length = self.engine.cached_len(destination)
        self._start[destination] = self._start[source]
        self._hold(destination, self._tokens[source][:length], self._held[source][:length])

    def adopt(self, slot: int, number: int) -> None:
        """Let a slot end with one of its alternatives of the last pass; see `Engine.adopt`."""
        self.engine.adopt(slot, number)
        row = [row for row in self._last_rows if row.slot == slot and row.alternative][number]
        self._drop(slot, row.position - self._start[slot])
        self._append(slot, [row.token])

    def tokens(self, slot: int) -> list[int]:
        """A copy of the tokens that a slot holds, from position `start` on."""
        return list(self._tokens[slot])

    def load(self, slot: int, tokens: list[int], saved: NDArray[np.uint8]) -> None:
        """Append tokens, one for each row of `saved`, to a slot whose `start` is 0; see `Engine.load`."""
        if len(tokens) > self.free_cells:
            raise EngineError(f"{len(tokens)} tokens do not fit into {self.free_cells} free cells of the KV cache.")
        self.engine.load(slot, saved)
        self._append(slot, tokens)

    def check(self) -> bool:
        """Whether the engine holds as many tokens in every slot as this record says; slots that differ are emptied."""
        wrong = [slot for slot in range(self.n_slots) if self.engine.cached_len(slot) != self.length(slot)]
        for slot in wrong:
            sentence = "specserve: slot %d of a KV cache holds %d tokens instead of %d, and is emptied"
            logger.error(sentence, slot, self.engine.cached_len(slot), self.length(slot))
            self.truncate(slot, 0)
        return not wrong

    def _append(self, slot: int, tokens: list[int]) -> None:
        self._hold(slot, tokens, list(islice(self._cells, len(tokens))))

    def _hold(self, slot: int, tokens: list[int], cells: list[int]) -> None:
        self._tokens[slot] += tokens
        self._held[slot] += cells
        self._holders.update(cells)
        if self._pinned[slot]:
            self._pins.update(cells)

    def _drop(self, slot: int, kept: int) -> None:
        """Note that a slot holds only the first `kept` of its tokens."""
        dropped = self._held[slot][kept:]
        _remove(self._holders, dropped)
        if self._pinned[slot]:
            _remove(self._pins, dropped)
        del self._tokens[slot][kept:], self._held[slot][kept:]


def _remove(counts: Counter[int], cells: list[int]) -> None:
    for cell in cells:
        if counts[cell] > 1:
            counts[cell] -= 1
        else:
            del counts[cell]
