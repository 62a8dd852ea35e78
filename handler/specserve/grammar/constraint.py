"""Grammars that an answer must follow: the only module that imports llguidance."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import Any, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError, MaskDeferred, RequestError
from specserve.grammar.gbnf import UnusableGrammar, gbnf_to_lark
from specserve.grammar.layout import WHITESPACE, Layout
from specserve.grammar.schema import UnusableSchema, schema_text
from specserve.sequence import common_prefix

BoolArray = NDArray[np.bool_]

# Forcing would tie the mask to one way of splitting the text into tokens, at a cost that grows with what is forced.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Unbounded whitespace is where small models get lost.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Without \\u, by which a property beside the named ones could be spelled like one of them and escape its schema.
_ESCAPES = 'nrbtf\\"'
# Measured on 151936 tokens: the most that stays near 0.5 s for compiling, 0.05 s for a mask and 100 MB. Of 500 real
# schemas two have more than 300 items in a row, and none more than 500 (benchmarks/schemas.py).
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
# More than two rounds' places; a mask is 19 kB for 151936 tokens.
_MASKS_KEPT = 64
# Bytes that a token has at most, of those that forced texts are made of.
_LONGEST = 16
# For 5,000 subschemas (schema.py), which take 6 kB each; what is not used costs nothing.
_STACK_BYTES = 256 * 2**20
# Grammars; one takes up to 100 MB, and 1 to 5 MB where it is an ordinary schema.
_GRAMMARS_KEPT = 8
# Masks whose time tells what the next one may take.
_TIMED_MASKS = 8
# Of a round's time for masks, what looking for one sequence's forced text may take.
_FORCING_SHARE = 0.1


class Marks(NamedTuple):
    """Tokens of a vocabulary with a meaning of their own: all that end a text, and those of single bytes."""

    ends: NDArray[np.intp]
    end_set: frozenset[int]
    bytes: Mapping[int, int]


class Compiled(NamedTuple):
    """A grammar that answers may follow.

    Args:
        matcher: at the beginning of a text; only copies of it move.
        layout: of an empty text, if it is to be JSON.
        failures: of all copies, see `Constraint`.
    """

    matcher: llguidance.LLMatcher
    layout: Layout | None
    failures: list[str]


@dataclass
class RoundTime:
    """Seconds of the engine's thread that the masks of all sequences have taken in this round, and may take."""

    spent: float = 0.0
    limit: float = math.inf


@dataclass
class Budget:
    """Seconds of the engine's thread that one request's grammar has taken, in all its answers, and may take."""

    seconds: float = math.inf
    spent: float = 0.0


class Constraint:
    """One answer's grammar: which tokens may follow those written so far.

    Every method is a function of `written` alone, the answer's tokens with drafted ones behind them: what is kept
    between calls only saves work, so drafts that are rejected need no undoing. Once following the grammar has become
    too much work for one answer, it is so for all that share it, for good.

    Args:
        compiled: the grammar.
        vocabulary: of the target.
        marks: of the vocabulary.
        round_time: of all constraints.
        budget: of the request.
    """

    def __init__(
        self, compiled: Compiled, vocabulary: Vocabulary, marks: Marks, round_time: RoundTime, budget: Budget
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocabulary = vocabulary
        self._marks = marks
        # Copies share llguidance's lexer: once one has spent its budget the others accept nothing, and do not say so.
        self._failures = compiled.failures
        self._consumed: list[int] = []
        # Only JSON is laid out. As for masks, few are kept: one more of them takes up to 30 kB.
        self._layout = compiled.layout
        self._layouts: dict[int, Layout] = {}
        self._masks: dict[int, bytes] = {}
        self._round_time = round_time
        self._budget = budget
        self._last_seconds: deque[float] = deque(maxlen=_TIMED_MASKS)

    @property
    def mask_seconds(self) -> float:
        """What a mask takes at present: the most that one of the last few did."""
        return max(self._last_seconds, default=0.0)

    def allowed(self, written: Sequence[int]) -> BoolArray | None:
        """The tokens that may follow, shape (vocabulary,).

        Returns:
            None where anything may follow: behind the end of the text, or behind a token that the grammar forbids
            and that therefore no rule accepts.

        Raises:
            ConstraintError: following the grammar takes more work than is allowed, or it leads nowhere from here.
            MaskDeferred: the round has no time left for it.
        """
        packed = self._packed(written)
        if packed is None:
            return None
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little", count=self._vocabulary.size)
        return bits.view(np.bool_)

    def complete(self, written: Sequence[int]) -> bool:
        """Whether nothing but the end of the text can follow; an answer can then end without another token.

        Where the round has no time left to find out it is False, and the next token ends the text.

        Raises:
            ConstraintError: see `allowed`.
        """
        try:
            mask = self.allowed(written)
        except MaskDeferred:
            return False
        return mask is not None and bool(np.count_nonzero(mask) == np.count_nonzero(mask[self._marks.ends]))

    def forced(self, written: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that the grammar's only next characters are likely to be written with.

        Where JSON leaves nothing free but whitespace, it is taken to be laid out like the answer so far.

        Raises:
            ConstraintError: see `allowed`.
        """
        if not self._follow(written):
            return []
        with self._timed():
            forced = self._only_text(limit * _LONGEST)
        tokens = self._vocabulary.encode(forced.decode("utf-8", errors="ignore"), begin=False)
        # The last token could go on into what is not forced.
        tokens = tokens[:-1][:limit]
        fits = forced.startswith(b"".join(map(self._vocabulary.piece, tokens)))
        return tokens if fits and self._marks.end_set.isdisjoint(tokens) else []

    def fork(self) -> Constraint:
        """An independent constraint by the same grammar; what was compiled is shared."""
        return Constraint(self._compiled, self._vocabulary, self._marks, self._round_time, self._budget)

    def _only_text(self, limit: int) -> bytes:
        """What has to follow the consumed tokens, at most `limit` bytes of it."""
        # Forcing changes a matcher, and with it the masks.
        matcher = self._matcher.deep_copy()
        layout = self._layout_behind(len(self._consumed))
        text = b""
        until = thread_time() + _FORCING_SHARE * self._round_time.limit
        while len(text) < limit and thread_time() <= until:
            more = matcher.compute_ff_bytes() or (self._laid_out(matcher, layout) if layout else b"")
            more = more[: limit - len(text)]
            path = [self._marks.bytes[byte] for byte in more if byte in self._marks.bytes]
            if not layout or len(path) < len(more):
                # Forcing has said all that there is, or the vocabulary cannot follow byte by byte.
                return text + more
            if not more or not matcher.consume_tokens(path):
                break
            text += more
            layout = layout.read(more)
        return text

    def _laid_out(self, matcher: llguidance.LLMatcher, layout: Layout) -> bytes:
        """The only character that may follow if it is no whitespace, behind the whitespace that is usual there."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        free = [byte for byte, token in self._marks.bytes.items() if bits[token] and byte not in WHITESPACE]
        gap = layout.before(free[0]) if len(free) == 1 else None
        return b"" if gap is None else gap + bytes(free)

    def _packed(self, written: Sequence[int]) -> bytes | None:
        """The mask, one bit a token."""
        self._check()
        place = len(written)
        known = self._masks.get(place)
        if known is not None and self._consumed[:place] == list(written):
            return known
        if not self._follow(written):
            return None
        before = self._budget.spent
        with self._timed():
            packed = self._matcher.compute_bitmask()
        self._last_seconds.append(self._budget.spent - before)
        # A failed matcher allows the end of the text, which would pass for an answer.
        self._check()
        self._masks[place] = packed
        if len(self._masks) > _MASKS_KEPT:
            del self._masks[min(self._masks)]
        return packed

    def _follow(self, written: Sequence[int]) -> bool:
        """Bring the matcher behind `written`; False where that ends the text or breaks the grammar."""
        tokens = list(written)
        shared = common_prefix(self._consumed, tokens)
        if shared < len(self._consumed):
            with self._timed():
                self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
            self._layouts = {place: layout for place, layout in self._layouts.items() if place <= shared}
            self._masks = {place: mask for place, mask in self._masks.items() if place <= shared}
        rest = tokens[shared:]
        if rest and self._marks.end_set.isdisjoint(rest):
            with self._timed():
                taken = self._matcher.try_consume_tokens(rest)
            self._consumed += rest[:taken]
            self._check()
            self._layout_behind(len(self._consumed))
            if taken < len(rest) and self._had_allowed(shared + taken, rest[taken]):
                self._failures.append("a token that it allowed is refused")
        self._check()
        return len(self._consumed) == len(tokens)

    def _layout_behind(self, place: int) -> Layout | None:
        """How the first `place` consumed tokens are laid out; read on from the nearest place that is kept."""
        if self._layout is None:
            return None
        known = max(self._layouts, default=0)
        layout = self._layouts.get(known, self._layout)
        for token in self._consumed[known:place]:
            known += 1
            layout = self._layouts[known] = layout.read(self._vocabulary.piece(token))
            self._layouts.pop(known - _MASKS_KEPT, None)
        return layout

    def _had_allowed(self, place: int, token: int) -> bool:
        mask = self._masks.get(place)
        return mask is not None and bool(mask[token // 8] >> token % 8 & 1)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count work against the round's time and the request's budget; a round that has spent its time begins none."""
        if self._round_time.spent >= self._round_time.limit:
            raise MaskDeferred("The round has no time left for the answer's grammar.")
        begun = thread_time()
        yield
        took = thread_time() - begun
        self._round_time.spent += took
        # What one round cannot hold would delay everyone.
        self._budget.spent += took if took <= self._round_time.limit else math.inf

    def _check(self) -> None:
        if not self._failures and self._matcher.is_error():
            self._failures.append(_in_one_line(self._matcher.get_error()))
        if self._failures:
            raise ConstraintError(f"The answer's grammar cannot be followed further: {self._failures[0]}")
        if self._budget.spent >= self._budget.seconds:
            raise ConstraintError("The answer's grammar cannot be followed further: it takes too much time")


class GrammarCompiler:
    """Compiles what requests ask for against one vocabulary.

    Args:
        vocabulary: of the target.
        seconds: of the engine's thread that following one request's grammar may take.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float = math.inf) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._round_time = RoundTime()
        self._kept: OrderedDict[str, Compiled] = OrderedDict()

    def prepare(self) -> None:
        """Index the vocabulary, which the first grammar waits for otherwise: 1.5 to 3.5 s for 151936 tokens."""
        _ = self.tokenizer

    def begin_round(self, seconds: float) -> None:
        """From now on the masks of all sequences may take so long together; further ones are deferred."""
        self._round_time.spent, self._round_time.limit = 0.0, seconds

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Constraint:
        """JSON that is valid by a schema, its properties in the schema's order.

        Raises:
            RequestError: the schema is invalid, too large, or asks for what cannot be promised.
        """
        try:
            text = schema_text(schema)
        except UnusableSchema as error:
            raise _refusal("JSON schema", error, "response_format") from error
        options = json.dumps({"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES})
        text = f'{{"x-guidance": {options}, {text[1:]}' if text != "{}" else f'{{"x-guidance": {options}}}'
        return self._compile(f"{_HEADER}start: %json {text}\n", "JSON schema", "response_format", Layout())

    def gbnf(self, grammar: str) -> Constraint:
        """Texts by a grammar in llama.cpp's format.

        Raises:
            RequestError: the grammar is invalid or too large.
        """
        try:
            lark = gbnf_to_lark(grammar)
        except UnusableGrammar as error:
            raise _refusal("grammar", error, "grammar") from error
        return self._compile(_HEADER + lark, "grammar", "grammar")

    def _compile(self, lark: str, what: str, param: str, layout: Layout | None = None) -> Constraint:
        """A constraint by a grammar that was compiled before, or is now; each has a budget of its own.

        What llguidance 1.9 cannot give each use is lexer states of its own: LLMatcher.deep_copy shares them. So a
        grammar whose uses have spent them is compiled anew for the next request.
        """
        compiled = self._kept.pop(lark, None)
        if compiled is None or compiled.failures:
            compiled = self._compiled(lark, what, param, layout)
        self._kept[lark] = compiled
        if len(self._kept) > _GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return Constraint(compiled, self._vocabulary, self._marks, self._round_time, Budget(self._seconds))

    def _compiled(self, lark: str, what: str, param: str, layout: Layout | None) -> Compiled:
        tokenizer = self.tokenizer
        matcher = _with_deep_stack(lambda: llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=_LIMITS))
        if matcher.is_error():
            raise _refusal(what, matcher.get_error(), param)
        if warnings := matcher.get_grammar_warnings():
            raise _refusal(what, warnings[0], param)
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise _refusal(what, trial.get_error(), param)
        return Compiled(matcher, layout, [])

    @cached_property
    def _marks(self) -> Marks:
        ends = self._vocabulary.end_tokens()
        pieces = enumerate(map(self._vocabulary.piece, range(self._vocabulary.size)))
        single = {piece[0]: token for token, piece in pieces if len(piece) == 1}
        return Marks(np.array(ends, np.intp), frozenset(ends), single)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance walks over it."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Pieces(self._vocabulary, self._marks.ends)),
            eos_token=self._marks.ends.tolist(),
        )


class _Pieces:
    """A vocabulary as llguidance wants it: the bytes that each token adds to the text."""

    special_token_ids: Sequence[int] = ()
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, ends: NDArray[np.intp]) -> None:
        self.eos_token_id = int(ends[0])
        # A token that ends the text may have a text too, </s> for one, and must not be taken for it.
        self.tokens = [vocabulary.piece(token) for token in range(vocabulary.size)]
        for token in ends.tolist():
            self.tokens[token] = b""

    def __call__(self, _text: bytes) -> list[int]:
        """Without forcing nothing is ever tokenised."""
        return []


def _with_deep_stack(compile_one: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """Run it in a thread of its own: the compiler recurses once a subschema, and an overrun stack ends the process."""
    found: list[llguidance.LLMatcher] = []
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: found.append(compile_one()), name="compiler")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0]


def _refusal(what: str, reason: object, param: str) -> RequestError:
    message = f"The {what} cannot be used: {_in_one_line(str(reason)).rstrip('.')}."
    return RequestError(message, param=param, code="invalid_value")


def _in_one_line(reason: str) -> str:
    """The compiler's message without its excerpts of the grammar and of its own state."""
    reason = reason.partition("failed to compile JSON schema: ")[2] or reason
    reason = re.split(r"\n\s*\d+ \| |<non-verbose/>|<state>|<backtrace>", reason)[0]
    return " ".join(reason.replace("NoExtensionBias", "no text can follow").split())[:300]
