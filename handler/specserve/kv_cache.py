"""What a model's KV cache holds, for target and draft model alike: the only record of the tokens.

Scheduler and draft model ask here which tokens a slot holds, how many a sequence still has to be fed, and which slot
holds the longest prefix of a text. An engine (engine/base.py) knows numbers of tokens only, and takes them from
llama.cpp; `KVCache.check` compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import Engine, FloatArray, Row
from specserve.sequence import Sequence, common_prefix

logger = logging.getLogger(__name__)


def worth_waiting(sequence: Sequence, cached: int, soon: int) -> bool:
    """Whether more than a quarter of what must be prefilled is being prefilled for another sequence, too.

    Args:
        sequence: that would wait.
        cached: how many of its tokens need no pass now.
        soon: how many will need none when the other prefill is over.
    """
    return soon > cached and 4 * (soon - cached) > len(sequence.tokens) - cached


class KVCache:
    """The slots of one model's KV cache, and the passes that add tokens to them.

    A slot holds the tokens of a text from position `start` to position `end`, not included. A target's start is 0. A
    draft model may begin later, and its engine counts positions from there: with `start` 744 the engine has token 744
    at position 0. All positions here are those of the text.

    Args:
        engine: the model's engine; nobody else adds tokens to its cache, but in slots that hold none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tokens: list[list[int]] = [[] for _ in range(engine.n_slots)]
        self._start = [0] * engine.n_slots
        # By slot, the position and the token of each alternative of the last pass.
        self._alternatives: dict[int, list[tuple[int, int]]] = {}

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return self.engine.n_slots

    def start(self, slot: int) -> int:
        """The position of the first token that a slot holds."""
        return self._start[slot]

    def end(self, slot: int) -> int:
        """The position after the last token that a slot holds; 0 if it holds none."""
        return self._start[slot] + len(self._tokens[slot])

    def length(self, slot: int) -> int:
        """The number of tokens that a slot holds."""
        return len(self._tokens[slot])

    def kv_len(self, slots: Iterable[int]) -> int:
        """How many cached tokens attention reads for a row of one of these slots; see `Engine.kv_len`."""
        return self.engine.kv_len(slots)

    def prefixes(self, tokens: list[int], max_length: int) -> list[int]:
        """By slot, how many leading tokens of a text need no pass there, counted up to `max_length`."""
        return [self.prefix(slot, tokens, max_length) for slot in range(self.n_slots)]

    def prefix(self, slot: int, tokens: list[int], max_length: int) -> int:
        """How many leading tokens of a text need no pass in a slot, counted up to `max_length`."""
        start, held = self._start[slot], self._tokens[slot]
        shared = common_prefix(held, tokens[start : start + len(held)] if start else tokens, max_length - start)
        return start + shared if shared else 0

    def forward(self, rows: list[Row]) -> FloatArray:
        """Run a forward pass, whose rows the slots hold afterwards; see `Engine.forward`.

        Args:
            rows: the positions are those of the text.

        Raises:
            EngineError: the pass failed; the cache is unchanged.
        """
        shifted = rows
        if any(self._start):
            shifted = [row._replace(position=row.position - self._start[row.slot]) for row in rows]
        logits = self.engine.forward(shifted)
        self._alternatives = {}
        for row in rows:
            if row.alternative:
                self._alternatives.setdefault(row.slot, []).append((row.position, row.token))
            else:
                self._tokens[row.slot].append(row.token)
        return logits

    def truncate(self, slot: int, end: int) -> None:
        """Remove a slot's tokens from position `end` on, and its alternatives."""
        kept = max(0, end - self._start[slot])
        del self._tokens[slot][kept:]
        self._alternatives.pop(slot, None)
        self.engine.truncate(slot, kept)
        if not self._tokens[slot]:
            self._start[slot] = 0

    def restart(self, slot: int, start: int) -> None:
        """Empty a slot; the next token that it is fed is the one at position `start`."""
        self.truncate(slot, 0)
        self._start[slot] = start

    def copy(self, source: int, destination: int, end: int) -> None:
        """Replace what a slot holds by what another one holds before position `end`, without computing it again.

        Raises:
            EngineError: the source holds less.
        """
        self.engine.copy(source, destination, end - self._start[source])
        self._start[destination] = self._start[source]
        self._tokens[destination] = self._tokens[source][: end - self._start[source]]
        self._alternatives.pop(destination, None)

    def adopt(self, slot: int, number: int) -> None:
        """Let a slot end with one of its alternatives of the last pass; see `Engine.adopt`."""
        position, token = self._alternatives.pop(slot)[number]
        self.engine.adopt(slot, number)
        self._tokens[slot][position - self._start[slot] :] = [token]

    @property
    def token_bytes(self) -> int | None:
        """The bytes of a cached token's keys and values; None if the engine cannot save them."""
        return self.engine.token_bytes

    def tokens(self, slot: int) -> list[int]:
        """A copy of the tokens that a slot holds, from position `start` on."""
        return list(self._tokens[slot])

    def save(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """The keys and values of a slot's tokens at these positions; the slot's `start` is 0. See `Engine.save`.

        Raises:
            EngineError: the slot holds less.
        """
        return self.engine.save(slot, start, end)

    def load(self, slot: int, tokens: list[int], saved: NDArray[np.uint8]) -> None:
        """Append tokens to a slot, whose `start` is 0, with keys and values that were saved from the same positions.

        Args:
            slot: what it holds are the tokens before these.
            tokens: one for each row of `saved`.
            saved: see `Engine.load`.

        Raises:
            EngineError: they do not fit; the cache is unchanged.
        """
        self.engine.load(slot, saved)
        self._tokens[slot] += tokens
        self._alternatives.pop(slot, None)

    def check(self) -> bool:
        """Whether the engine holds as many tokens in every slot as this record says; slots that differ are emptied."""
        wrong = [slot for slot in range(self.n_slots) if self.engine.cached_len(slot) != self.length(slot)]
        for slot in wrong:
            logger.error(
                "specserve: slot %d of a KV cache holds %d tokens instead of %d, and is emptied",
                slot,
                self.engine.cached_len(slot),
                self.length(slot),
            )
            self.truncate(slot, 0)
        return not wrong
