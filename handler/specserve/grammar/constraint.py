"""Grammar constraints: masks of allowed tokens and forced tokens, computed by llguidance."""

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

# llguidance's own forcing restricts the mask to one tokenisation of forced text, at a cost that grows with its length.
_HEADER = '%llguidance {"no_forcing": true}\n'
# At most 40 characters: small models tend to generate whitespace without end.
_WHITESPACE_PATTERN = r"[\x20\x0A\x0D\x09]{1,40}"
# Without \\u: with it, an additional property could be spelled like a named one and escape its schema.
_ESCAPES = 'nrbtf\\"'
# With 151,936 tokens these keep compilation to 0.5 s, a mask to 0.05 s and memory to 100 MB. Of 500 real schemas two
# need more than 300 items in a row, and none more than 500 (benchmarks/schemas.py).
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
# Positions whose mask and layout are cached, more than two rounds need. A mask takes 19 kB for 151,936 tokens, a layout
# up to 30 kB.
_CACHED_POSITIONS = 64
# Longest token of forced text, in bytes.
_MAX_TOKEN_BYTES = 16
# Stack of the compiler's thread, which recurses for each subschema with 6 kB; schema.py allows 4,000 of them. Pages
# that are not used cost nothing.
_STACK_BYTES = 256 * 2**20
# An ordinary schema takes 1 to 5 MB, a grammar at the limits 100 MB.
_CACHED_GRAMMARS = 8
# Share of a round's mask time that searching for one sequence's forced tokens may take.
_FORCING_SHARE = 0.1


class SpecialTokens(NamedTuple):
    """Token ids that end an answer, as array and set, and the token id of each single byte."""

    end: NDArray[np.intp]
    end_set: frozenset[int]
    single_byte: Mapping[int, int]


class CompiledGrammar(NamedTuple):
    """A compiled grammar, shared by all answers that must follow it.

    Args:
        matcher: at the start of an answer; only copies of it advance.
        is_json: whether the answer is JSON, whose whitespace `Layout` predicts.
        failures: errors of any copy. Copies share llguidance's lexer (it has a lock of its own): once one has exhausted
            its states, the others accept nothing and do not report it. The engine thread appends, the parser's reads;
            what it reads too early gives its request a grammar that fails with the same error.
    """

    matcher: llguidance.LLMatcher
    is_json: bool
    failures: list[str]


@dataclass
class Budget:
    """Seconds of the engine's thread that masks may take, of one round or of one request, and have taken."""

    limit: float = math.inf
    spent: float = 0.0


class Constraint:
    """The grammar of one answer: which tokens may follow.

    Every method is a function of `tokens` alone, the answer's tokens followed by drafts. State between calls is only a
    cache, so rejected drafts need no undoing. A `ConstraintError` is permanent, for all answers that share the grammar.

    Args:
        compiled: the grammar.
        vocabulary: of the target.
        special: of the vocabulary.
        round_budget: shared by all constraints.
        request_budget: shared by all answers of the request.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocabulary: Vocabulary,
        special: SpecialTokens,
        round_budget: Budget,
        request_budget: Budget,
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocabulary = vocabulary
        self._special = special
        self._round_budget = round_budget
        self._request_budget = request_budget
        # Tokens that the matcher has consumed.
        self._consumed: list[int] = []
        # Masks by position, and the layouts after the last consumed tokens.
        self._masks: dict[int, bytes] = {}
        self._layouts: deque[Layout] = deque(maxlen=_CACHED_POSITIONS)

    def allowed(self, tokens: Sequence[int]) -> BoolArray | None:
        """Return the mask of the tokens that may follow, shape (vocabulary,).

        Returns:
            None if any token may follow: after the end of the answer, or after a token that the grammar forbids and
            that is therefore never accepted.

        Raises:
            ConstraintError: following the grammar takes too much time, or no token can follow.
            MaskDeferred: the round has no time left for it.
        """
        packed = self._packed_mask(tokens)
        if packed is None:
            return None
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little", count=self._vocabulary.size)
        return bits.view(np.bool_)

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether only the end of the answer can follow, so that it can end without another token.

        False if the round has no time left to find out; the next token then ends the answer.

        Raises:
            ConstraintError: see `allowed`.
        """
        try:
            mask = self.allowed(tokens)
        except MaskDeferred:
            return False
        return mask is not None and bool(np.count_nonzero(mask) == np.count_nonzero(mask[self._special.end]))

    def forced(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` draft tokens for the text that the grammar forces.

        In JSON, where only whitespace is free, it is predicted from the answer's layout so far. With it, greedy JSON
        by a schema decodes 3.5 % faster beside other drafters and 31 % faster with this one alone: the mean over
        benchmarks/prompts/schema.yaml, default pair, 2 cores, against drafts without it.

        Raises:
            ConstraintError: see `allowed`.
        """
        if not self._follow(tokens):
            return []
        with self._timed():
            text = self._forced_text(limit * _MAX_TOKEN_BYTES)
        forced = self._vocabulary.encode(text.decode("utf-8", errors="ignore"), begin=False)
        # The last token is left out: the model may choose a longer one that goes on beyond the forced text.
        forced = forced[:-1][:limit]
        matches = text.startswith(b"".join(map(self._vocabulary.piece, forced)))
        return forced if matches and self._special.end_set.isdisjoint(forced) else []

    def fork(self) -> Constraint:
        """Return an independent constraint by the same grammar."""
        return Constraint(self._compiled, self._vocabulary, self._special, self._round_budget, self._request_budget)

    def _forced_text(self, limit: int) -> bytes:
        """Return at most `limit` bytes that must follow the consumed tokens."""
        # Forcing changes a matcher, and with it the masks.
        matcher = self._matcher.deep_copy()
        layout = self._layout() if self._compiled.is_json else None
        text = b""
        until = thread_time() + _FORCING_SHARE * self._round_budget.limit
        while len(text) < limit and thread_time() <= until:
            more = matcher.compute_ff_bytes() or (self._after_whitespace(matcher, layout) if layout else b"")
            more = more[: limit - len(text)]
            path = [self._special.single_byte[byte] for byte in more if byte in self._special.single_byte]
            if not layout or len(path) < len(more):
                # Nothing more is forced, or the vocabulary lacks tokens of single bytes to continue with.
                return text + more
            if not more or not matcher.consume_tokens(path):
                break
            text += more
            layout = layout.read(more)
        return text

    def _after_whitespace(self, matcher: llguidance.LLMatcher, layout: Layout) -> bytes:
        """Return the only allowed character beside whitespace, preceded by the predicted whitespace."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [byte for byte, token in self._special.single_byte.items() if bits[token]]
        others = [byte for byte in allowed if byte not in WHITESPACE]
        gap = layout.before(others[0]) if len(others) == 1 else None
        return b"" if gap is None else gap + bytes(others)

    def _packed_mask(self, tokens: Sequence[int]) -> bytes | None:
        """Return the mask, one bit a token."""
        self._check()
        position = len(tokens)
        cached = self._masks.get(position)
        if cached is not None and self._consumed[:position] == list(tokens):
            return cached
        if not self._follow(tokens):
            return None
        with self._timed():
            packed = self._matcher.compute_bitmask()
        # A failed matcher allows the end of the answer, which would pass for a complete one.
        self._check()
        self._masks[position] = packed
        if len(self._masks) > _CACHED_POSITIONS:
            del self._masks[min(self._masks)]
        return packed

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Move the matcher after `tokens`; False if they end the answer or break the grammar."""
        tokens = list(tokens)
        shared = common_prefix(self._consumed, tokens)
        if (rejected := len(self._consumed) - shared) > 0:
            with self._timed():
                self._matcher.rollback(rejected)
            del self._consumed[shared:]
            self._masks = {position: mask for position, mask in self._masks.items() if position <= shared}
            for _ in range(min(rejected, len(self._layouts))):
                self._layouts.pop()
        rest = tokens[shared:]
        if rest and self._special.end_set.isdisjoint(rest):
            with self._timed():
                taken = self._matcher.try_consume_tokens(rest)
            for token in rest[:taken]:
                if self._compiled.is_json:
                    self._layouts.append(self._layout().read(self._vocabulary.piece(token)))
                self._consumed.append(token)
            self._check()
            if taken < len(rest) and self._was_allowed(shared + taken, rest[taken]):
                self._compiled.failures.append("a token that it allowed is refused")
        self._check()
        return len(self._consumed) == len(tokens)

    def _layout(self) -> Layout:
        """Return the layout after the consumed tokens; read from the start after a rollback beyond the cache."""
        if not self._layouts:
            self._layouts.append(Layout().read(b"".join(map(self._vocabulary.piece, self._consumed))))
        return self._layouts[-1]

    def _was_allowed(self, position: int, token: int) -> bool:
        mask = self._masks.get(position)
        return mask is not None and bool(mask[token // 8] >> token % 8 & 1)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count work against both budgets; refuse to start it if the round's is spent."""
        if self._round_budget.spent >= self._round_budget.limit:
            raise MaskDeferred("The round has no time left for the answer's grammar.")
        begun = thread_time()
        yield
        took = thread_time() - begun
        self._round_budget.spent += took
        # Work that exceeds a whole round's budget would delay all requests, so it ends this one.
        self._request_budget.spent += took if took <= self._round_budget.limit else math.inf

    def _check(self) -> None:
        failures = self._compiled.failures
        if not failures and self._matcher.is_error():
            failures.append(_in_one_line(self._matcher.get_error()))
        if failures:
            raise ConstraintError(f"The answer's grammar cannot be followed further: {failures[0]}")
        if self._request_budget.spent >= self._request_budget.limit:
            raise ConstraintError("The answer's grammar cannot be followed further: it takes too much time")


class GrammarCompiler:
    """Compiles schemas and grammars for one vocabulary.

    Args:
        vocabulary: of the target.
        seconds: of the engine's thread that the masks of one request may take.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float = math.inf) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._round_budget = Budget()
        # Least recently used first.
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Build the index of the vocabulary before the first request: 1.5 to 3.5 s for 151,936 tokens."""
        _ = self.tokenizer

    def begin_round(self, seconds: float) -> None:
        """Give all masks of the next round `seconds` of time, in the engine thread; later ones are deferred."""
        self._round_budget.spent, self._round_budget.limit = 0.0, seconds

    def json_object(self) -> Constraint:
        """Return a constraint to any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Constraint:
        """Return a constraint to JSON that is valid by a schema, with properties in the schema's order.

        Raises:
            RequestError: the schema is invalid, too large, or uses a keyword that is not supported.
        """
        try:
            text = schema_text(schema)
        except UnusableSchema as error:
            raise _refusal("JSON schema", error, "response_format") from error
        options = json.dumps({"whitespace_pattern": _WHITESPACE_PATTERN, "json_allowed_escapes": _ESCAPES})
        text = f'{{"x-guidance": {options}, {text[1:]}' if text != "{}" else f'{{"x-guidance": {options}}}'
        return self._constraint(f"{_HEADER}start: %json {text}\n", "JSON schema", "response_format", is_json=True)

    def gbnf(self, grammar: str) -> Constraint:
        """Return a constraint to a grammar in llama.cpp's format.

        Raises:
            RequestError: the grammar is invalid or too large.
        """
        try:
            lark = gbnf_to_lark(grammar)
        except UnusableGrammar as error:
            raise _refusal("grammar", error, "grammar") from error
        return self._constraint(_HEADER + lark, "grammar", "grammar", is_json=False)

    def _constraint(self, lark: str, what: str, param: str, *, is_json: bool) -> Constraint:
        """Return a constraint by a grammar, compiled or from the cache, with a budget of its own.

        A grammar whose lexer states are exhausted is compiled again for the next request: in llguidance 1.9
        LLMatcher.deep_copy shares them.
        """
        compiled = self._cache.pop(lark, None)
        if compiled is None or compiled.failures:
            compiled = CompiledGrammar(self._compile(lark, what, param), is_json, [])
        self._cache[lark] = compiled
        if len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return Constraint(compiled, self._vocabulary, self._special, self._round_budget, Budget(self._seconds))

    def _compile(self, lark: str, what: str, param: str) -> llguidance.LLMatcher:
        tokenizer = self.tokenizer
        matcher = _with_large_stack(lambda: llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=_LIMITS))
        if matcher.is_error():
            raise _refusal(what, matcher.get_error(), param)
        if warnings := matcher.get_grammar_warnings():
            raise _refusal(what, warnings[0], param)
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise _refusal(what, trial.get_error(), param)
        return matcher

    @cached_property
    def _special(self) -> SpecialTokens:
        end = self._vocabulary.end_tokens()
        pieces = enumerate(map(self._vocabulary.piece, range(self._vocabulary.size)))
        single_byte = {piece[0]: token for token, piece in pieces if len(piece) == 1}
        return SpecialTokens(np.array(end, np.intp), frozenset(end), single_byte)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The vocabulary in llguidance's format."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Pieces(self._vocabulary, self._special.end)),
            eos_token=self._special.end.tolist(),
        )


class _Pieces:
    """The tokenizer interface that llguidance expects: the bytes of every token."""

    special_token_ids: Sequence[int] = ()
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: NDArray[np.intp]) -> None:
        self.eos_token_id = int(end[0])
        # An end token may also have a text, such as </s>, and must not match it in a grammar.
        self.tokens = [vocabulary.piece(token) for token in range(vocabulary.size)]
        for token in end.tolist():
            self.tokens[token] = b""

    def __call__(self, _text: bytes) -> list[int]:
        """Return nothing: without llguidance's forcing, no text is tokenised."""
        return []


def _with_large_stack(compile_one: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """Compile in a thread: the compiler recurses for each subschema, and a stack overflow ends the process."""
    result: list[llguidance.LLMatcher] = []
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: result.append(compile_one()), name="compiler")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return result[0]


def _refusal(what: str, reason: object, param: str) -> RequestError:
    message = f"The {what} cannot be used: {_in_one_line(str(reason)).rstrip('.')}."
    return RequestError(message, param=param, code="invalid_value")


def _in_one_line(reason: str) -> str:
    """Return the compiler's message without its excerpts of the grammar and of its state."""
    reason = reason.partition("failed to compile JSON schema: ")[2] or reason
    reason = re.split(r"\n\s*\d+ \| |<non-verbose/>|<state>|<backtrace>", reason)[0]
    return " ".join(reason.replace("NoExtensionBias", "no text can follow").split())[:300]
