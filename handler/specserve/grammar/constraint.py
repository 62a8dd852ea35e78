"""Follows a grammar: llguidance computes which tokens may come next, and which text has to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import Any, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError, MaskDeferred
from specserve.grammar.layout import WHITESPACE, Layout
from specserve.sequence import common_prefix

BoolArray = NDArray[np.bool_]

# Positions whose masks and layouts are cached: more than two rounds need. A mask takes 19 kB for 151,936 tokens, and a
# layout up to 30 kB.
_CACHED_POSITIONS = 64
# Longest token of forced text, in bytes.
_MAX_TOKEN_BYTES = 16
# Share of a round's mask time that searching for one sequence's forced tokens may take.
_FORCING_SHARE = 0.1
# What llguidance says, also of its own options, and what that means here.
_REWORDED = {
    "NoExtensionBias": "no text can follow",
    'failed to parse "%json": recursion limit exceeded': "it is too deeply nested",
    "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable "
    "limits.precompute_large_lexemes": "its texts and patterns are too large",
}


@dataclass
class Budget:
    """Seconds of the engine's thread that the masks of a round, or of a request, may take and have taken."""

    max_seconds: float = math.inf
    spent_seconds: float = 0.0


class CompiledGrammar(NamedTuple):
    """A compiled grammar, which all answers that must follow it share."""

    matcher: llguidance.LLMatcher  # at the start of an answer; only copies of it advance
    is_json: bool  # so that `Layout` predicts whitespace
    vocabulary: Vocabulary
    single_byte: Mapping[int, int]  # by byte, the token that spells it alone
    round_budget: Budget  # of all constraints together
    # Errors of the lexer, which copies share (it has a lock of its own): once one has exhausted its states, the others
    # accept nothing and do not report it. The engine thread appends, the parser's read; what it reads too early gives
    # its request a grammar that fails with the same error.
    failures: list[str]


class Constraint:
    """The grammar of an answer, which tells the tokens that may follow.

    Every method is a function of `tokens` alone, the answer's tokens followed by drafts, but for the two budgets. State
    between calls is only a cache, so rejected drafts need no undoing: where a draft leads to a dead end, only answers
    with that draft have no mask. A `ConstraintError` affects other answers only if the lexer raised it
    (`CompiledGrammar`), and later calls only if the budget is spent, which all answers of the request share.
    """

    # What a schema says and answers may break, by its keywords.
    relaxed: tuple[str, ...] = ()

    def __init__(self, compiled: CompiledGrammar, budget: Budget) -> None:
        self._compiled = compiled
        self._budget = budget
        self._matcher = compiled.matcher.deep_copy()
        # Tokens that the matcher has consumed. After an error it begins anew when it is needed.
        self._consumed: list[int] = []
        # By the number of tokens before them.
        self._masks: dict[int, bytes] = {}
        self._layouts: dict[int, Layout] = {}

    def fork(self) -> Constraint:
        return Constraint(self._compiled, self._budget)

    def allowed(self, tokens: Sequence[int]) -> BoolArray | None:
        # None, all tokens, also follows one that the grammar forbids, and that is therefore never accepted.
        self._check()
        position = len(tokens)
        if position not in self._masks or self._consumed[:position] != list(tokens):
            if not self._follow(tokens):
                return None
            with self._timed():
                mask = self._matcher.compute_bitmask()
            # A failed matcher allows the end of the answer, which would pass for a complete one.
            self._check_matcher()
            self._check()
            _keep(self._masks, position, mask)
        return _unpacked(self._masks[position], self._compiled.vocabulary.size)

    def complete(self, tokens: Sequence[int]) -> bool:
        # Following a token takes a small part of the time of a mask: at most 5 ms, in a row of 500 items. Where the
        # grammar cannot be followed, the next mask, if another token is needed, raises that.
        try:
            # Nothing is consumed after a complete answer.
            at_end = self.follows(tokens) and len(self._consumed) == len(tokens)
        except ConstraintError:
            return False
        return at_end and self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        # In JSON, where only whitespace is free, it is predicted from the answer's layout so far.
        self._check()
        if not self._follow(tokens):
            return []
        with self._timed():
            text = self._forced_text(max_tokens * _MAX_TOKEN_BYTES)
        vocabulary = self._compiled.vocabulary
        # The model may choose a longer token than the last.
        forced = vocabulary.encode(text.decode("utf-8", errors="ignore"), begin=False)[:max_tokens]
        matches = text.startswith(b"".join(map(vocabulary.piece, forced)))
        return forced if matches and set(forced).isdisjoint(vocabulary.end_tokens()) else []

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether the grammar allows these tokens, whatever the round's budget; raises like `allowed`."""
        tokens = list(tokens)
        # What is consumed stays so, and with it the masks of what follows.
        return self._consumed[: len(tokens)] == tokens or self._follow(tokens, may_defer=False)

    def spell(self, text: bytes) -> list[int]:
        """Return the tokens of the text's single bytes; none if a byte has no token."""
        tokens = [self._compiled.single_byte.get(byte, -1) for byte in text]
        return [] if -1 in tokens else tokens

    def _forced_text(self, max_bytes: int) -> bytes:
        # Forcing changes a matcher, and with it the masks.
        matcher = self._matcher.deep_copy()
        layout = self._layout() if self._compiled.is_json else None
        text = b""
        deadline = thread_time() + _FORCING_SHARE * self._compiled.round_budget.max_seconds
        while len(text) < max_bytes and thread_time() <= deadline:
            more = matcher.compute_ff_bytes() or (self._after_whitespace(matcher, layout) if layout else b"")
            more = more[: max_bytes - len(text)]
            path = self.spell(more)
            if not layout or not path:
                # Nothing more is forced, or the vocabulary lacks tokens of single bytes to continue with.
                return text + more
            if not matcher.consume_tokens(path):
                break
            text += more
            layout = layout.read(more)
        return text

    def _after_whitespace(self, matcher: llguidance.LLMatcher, layout: Layout) -> bytes:
        """Return the predicted whitespace and the only character that is allowed beside whitespace."""
        mask = _unpacked(matcher.compute_bitmask(), self._compiled.vocabulary.size)
        allowed = (byte for byte, token in self._compiled.single_byte.items() if mask[token])
        others = [byte for byte in allowed if byte not in WHITESPACE]
        gap = layout.before(others[0]) if len(others) == 1 else None
        return b"" if gap is None else gap + bytes(others)

    def _layout(self) -> Layout:
        known = max(self._layouts, default=0)
        rest = b"".join(map(self._compiled.vocabulary.piece, self._consumed[known:]))
        layout = self._layouts.get(known, Layout()).read(rest)
        _keep(self._layouts, len(self._consumed), layout)
        return layout

    def _follow(self, tokens: Sequence[int], *, may_defer: bool = True) -> bool:
        """Move the matcher after `tokens`; False if they end the answer or break the grammar."""
        tokens = list(tokens)
        shared = common_prefix(self._consumed, tokens)
        rejected, failed = len(self._consumed) - shared, self._matcher.is_error()
        if rejected or failed:
            with self._timed(may_defer=may_defer):
                if failed:
                    self._matcher = self._compiled.matcher.deep_copy()
                    self._matcher.try_consume_tokens(tokens[:shared])
                else:
                    self._matcher.rollback(rejected)
            del self._consumed[shared:]
            self._masks = {position: mask for position, mask in self._masks.items() if position <= shared}
            self._layouts = {position: layout for position, layout in self._layouts.items() if position <= shared}
        rest = tokens[shared:]
        if rest and set(rest).isdisjoint(self._compiled.vocabulary.end_tokens()):
            with self._timed(may_defer=may_defer):
                taken = self._matcher.try_consume_tokens(rest)
            self._check_matcher()
            self._consumed += rest[:taken]
            mask = self._masks.get(shared + taken)
            if taken < len(rest) and mask and mask[rest[taken] // 8] >> rest[taken] % 8 & 1:
                self._compiled.failures.append("a token that it allowed is refused")
                self._check()
        return len(self._consumed) == len(tokens)

    @contextmanager
    def _timed(self, *, may_defer: bool = True) -> Iterator[None]:
        """Count work against both budgets; refuse to start it if the round's is spent."""
        in_round = self._compiled.round_budget
        if may_defer and in_round.spent_seconds >= in_round.max_seconds:
            raise MaskDeferred("The round has no time left for the answer's grammar.")
        begun = thread_time()
        yield
        seconds = thread_time() - begun
        in_round.spent_seconds += seconds
        # A mask that exceeds a whole round's budget would delay all requests, so it ends this one.
        is_too_slow = may_defer and seconds > in_round.max_seconds
        self._budget.spent_seconds += math.inf if is_too_slow else seconds

    def _check(self) -> None:
        """Raise why the grammar cannot be followed, whatever the tokens."""
        if self._compiled.failures:
            raise _failure(self._compiled.failures[0])
        if self._budget.spent_seconds >= self._budget.max_seconds:
            raise _failure("it takes too much time")

    def _check_matcher(self) -> None:
        """Raise why the matcher has failed; note an error of the lexer."""
        if self._matcher.is_error():
            error = in_one_line(self._matcher.get_error())
            if "lexer error" in error:
                self._compiled.failures.append(error)
            raise _failure(error)


def _keep(cache: dict[int, Any], position: int, value: bytes | Layout) -> None:
    cache[position] = value
    if len(cache) > _CACHED_POSITIONS:
        del cache[min(cache)]


def _unpacked(mask: bytes, size: int) -> BoolArray:
    """Return a mask as llguidance packs it, with a bit for each token, in shape (size,)."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=size).view(np.bool_)


def _failure(reason: str) -> ConstraintError:
    return ConstraintError(f"The answer's grammar cannot be followed further: {reason.rstrip('.')}.")


def in_one_line(reason: str) -> str:
    """Return the compiler's message without its excerpts of the grammar and of its state."""
    reason = reason.partition("failed to compile JSON schema: ")[2] or reason
    reason = re.split(r"\n\s*\d+ \| |<non-verbose/>|<state>|<backtrace>", reason)[0]
    reason = re.sub(r"^(?:at )?\d+\(\d+\): ", "", reason)
    for theirs, ours in _REWORDED.items():
        reason = reason.replace(theirs, ours)
    return " ".join(reason.split())[:300]
