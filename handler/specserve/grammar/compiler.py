"""Compiles JSON schemas and GBNF grammars for a vocabulary, and keeps what it has compiled."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.grammar.constraint import Budget, CompiledGrammar, Constraint, SpecialTokens, in_one_line
from specserve.grammar.gbnf import MAX_TEXT as MAX_GRAMMAR_TEXT
from specserve.grammar.gbnf import UnusableGrammar, gbnf_to_lark
from specserve.grammar.schema import MAX_SUBSCHEMAS, MAX_TEXT, ReadSchema, UnusableSchema, read_schema
from specserve.grammar.tool_calls import CallConstraint, CallGrammar, CallSyntax, Reasoning, control_tokens

# llguidance's own forcing restricts the mask to one tokenisation of forced text, at a cost that grows with its length.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Maximum 40 characters: small models tend to generate whitespace without end.
_WHITESPACE_PATTERN = r"[\x20\x0A\x0D\x09]{1,40}"
# Without \\u: with it, an additional property could be spelled like a named one and escape its schema.
_ESCAPES = 'nrbtf\\"'
_FLEXIBLE = {"whitespace_pattern": _WHITESPACE_PATTERN, "json_allowed_escapes": _ESCAPES}
# The layout of json.dumps, in which chat templates show calls.
_EXACT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": _ESCAPES,
}
# Before a tool's name each is an item of the row (`max_items_in_row`), beside a few others.
MAX_TOOLS = 400
# Of at most so many tools those that cannot be compiled are searched for.
_TOOLS_TO_SEARCH = 64
# What is left out first of a tool that cannot be compiled, and what is asked of its arguments if nothing else helps.
_COSTLY = frozenset({"pattern", "patternProperties", "minProperties", "maxProperties"})
_LEFT_OUT = (_COSTLY, _COSTLY | {"$ref"})
_ANY_OBJECT = ReadSchema('{"type": "object"}', "", 1, ("parameters",))
# At most so many keywords are named with their tools.
_MAX_NAMES = 16
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
# Stack of the compiler's thread, which recurses for each subschema with 6 kB; schema.py allows 4,000 of them. Pages
# that are not used cost nothing.
_STACK_BYTES = 256 * 2**20
_STACK_SIZE = threading.Lock()
# An ordinary schema takes 1 to 5 MB, a grammar at the limits 100 MB.
_CACHED_GRAMMARS = 8


class GrammarCompiler:
    """Compiles schemas and grammars for a vocabulary.

    Args:
        vocabulary: of the target.
        max_seconds: of the engine's thread that the masks of a request may take.
    """

    def __init__(self, vocabulary: Vocabulary, max_seconds: float = math.inf) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._round_budget = Budget()
        # Least recently used first.
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Build the index of the vocabulary before the first request: that takes 1.5 to 3.5 s for 151,936 tokens."""
        _ = self.tokenizer

    def begin_round(self, max_seconds: float) -> None:
        """Give all masks of the next round so much time, in the engine thread; later ones are deferred."""
        self._round_budget.spent_seconds, self._round_budget.max_seconds = 0.0, max_seconds

    def json_object(self) -> Constraint:
        """Return a constraint to any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Constraint:
        """Return a constraint to JSON that is valid by a schema, with properties in the schema's order.

        Raises:
            RequestError: the schema is invalid, too large, or uses a keyword that is not supported.
        """
        read = self._read(schema, "JSON schema", "response_format")
        lark = f"{_HEADER}start: %json {_with_options(read.text, _FLEXIBLE)}\n"
        return self._constraint(lark, "JSON schema", "response_format", is_json=True, left=read.left)

    def calls(
        self,
        tools: Mapping[str, dict[str, Any]],
        syntax: CallSyntax,
        *,
        required: bool,
        parallel: bool,
        strict: Collection[str] = (),
        otherwise: dict[str, Any] | None = None,
        reasoning: Reasoning | None = None,
    ) -> Constraint | CallConstraint:
        """Return a constraint to calls of tools, from the first token on or from where the model opens one.

        Args:
            tools: by name, the JSON schema of the arguments.
            syntax: how the model writes calls.
            required: whether the answer has to be one or more calls.
            parallel: whether it may have several.
            strict: the tools whose schemas are asserted as a whole; of others `relaxed` names what is not.
            otherwise: the JSON schema of an answer that is no call; None leaves that free.
            reasoning: what surrounds reasoning before an answer that is free.

        Raises:
            RequestError: a strict schema is invalid or not supported, or all together are too large.
        """
        read = self._read_tools(tools, strict)
        in_calls = syntax.tags(self._vocabulary)
        is_free = not required and otherwise is None
        other, left = None, next((schema.left for schema in read.values() if schema.left), "")
        if otherwise is not None and not required:
            if not syntax.forms[0].tag:
                raise _refusal("response format", "this model's calls look like any JSON", "response_format")
            other = _with_options(self._read(otherwise, "JSON schema", "response_format").text, _FLEXIBLE)

        def lark(some: Mapping[str, ReadSchema]) -> str:
            layouts = (_EXACT, _FLEXIBLE)
            texts = {name: [_with_options(schema.text, layout) for layout in layouts] for name, schema in some.items()}
            grammar = CallGrammar(texts, in_calls)
            opened = grammar.opened if is_free else partial(grammar.whole, otherwise=other)
            return _HEADER + opened(syntax, parallel=parallel)

        try:
            call = self._constraint(lark(read), "tools", "tools", is_json=False, left=left)
        except RequestError:
            if other is not None:
                self.json_schema(otherwise or {})  # raises if that is at fault
            if len(read) > _TOOLS_TO_SEARCH:
                raise
            for name, arguments in tools.items():
                weaker = [*(_relaxed({**arguments, "type": "object"}, keys) for keys in _LEFT_OUT), _ANY_OBJECT]
                read[name] = self._compilable(name, [read[name], *(weaker if name not in strict else [])], lark)
            call = self._constraint(lark(read), "tools", "tools", is_json=False, left=left)
        relaxed = _names({name: schema.relaxed for name, schema in read.items()})
        if not is_free:
            call.relaxed = relaxed
            return call
        named = in_calls | (control_tokens(reasoning[:2], self._vocabulary) if reasoning else {})
        options: Any = {"parallel": parallel, "reasoning": reasoning}
        constraint = CallConstraint(call, syntax.forms, read, self._vocabulary, named, **options)
        constraint.relaxed = relaxed
        return constraint

    def _read_tools(self, tools: Mapping[str, dict[str, Any]], strict: Collection[str]) -> dict[str, ReadSchema]:
        """Read the schemas of arguments, which are objects even where they do not say so."""
        read: dict[str, ReadSchema] = {}
        size, length = 0, 0
        if len(tools) > MAX_TOOLS:
            raise _refusal("tools", f"they are more than {MAX_TOOLS}", "tools")
        for name, schema in tools.items():
            if schema.get("type", "object") not in ("object", ["object"], None):
                raise _refusal(f"tool '{name}'", "its arguments have to be of the type 'object'", "tools")
            whole = {**schema, "type": "object"}
            read[name] = self._read(whole, f"tool '{name}'", "tools") if name in strict else _relaxed(whole)
            size, length = size + read[name].size, length + len(read[name].text)
            if size > MAX_SUBSCHEMAS:
                raise _refusal("tools", f"they have more than {MAX_SUBSCHEMAS} subschemas together", "tools")
            if length > MAX_TEXT:
                raise _refusal("tools", f"they have more than {MAX_TEXT // 1024} KiB of schemas together", "tools")
        return read

    def _compilable(
        self, name: str, schemas: Sequence[ReadSchema], lark: Callable[[Mapping[str, ReadSchema]], str]
    ) -> ReadSchema:
        """Return the first of a tool's schemas that can be compiled; raises why the last one cannot."""

        def check(schema: ReadSchema) -> ReadSchema:
            self._compile(lark({name: schema}), f"tool '{name}'", "tools", schema.left)
            return schema

        for schema in schemas[:-1]:
            with suppress(RequestError):
                return check(schema)
        return check(schemas[-1])

    def _read(self, schema: dict[str, Any], what: str, param: str) -> ReadSchema:
        try:
            return read_schema(schema)
        except UnusableSchema as error:
            raise _refusal(what, error, param) from error

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

    def regex(self, pattern: str) -> Constraint:
        """Return a constraint to text that a regular expression (of Rust's crate `regex`) matches as a whole.

        Raises:
            RequestError: it is invalid, or too large.
        """
        if len(pattern) > MAX_GRAMMAR_TEXT:
            raise _refusal("regular expression", f"it is longer than {MAX_GRAMMAR_TEXT // 1024} KiB", "regex")
        # The whole text has to match, so anchors at its ends say nothing; an escaped `$` is none.
        whole = re.sub(r"^\^|(?<!\\)\$$", "", pattern)
        # A slash would end the expression, and Lark takes no line break in it.
        escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), whole)
        return self._constraint(f"{_HEADER}start: /{escaped}/\n", "regular expression", "regex", is_json=False)

    def _constraint(self, lark: str, what: str, param: str, *, is_json: bool, left: str = "") -> Constraint:
        """Return a constraint by a grammar, compiled or from the cache, with a budget of its own.

        A grammar whose lexer states are exhausted is compiled again for the next request: in llguidance 1.9
        LLMatcher.deep_copy shares them.
        """
        compiled = self._cache.pop(lark, None)
        if compiled is None or compiled.failures:
            compiled = CompiledGrammar(self._compile(lark, what, param, left), is_json, [])
        self._cache[lark] = compiled
        if len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return Constraint(compiled, self._vocabulary, self._special, self._round_budget, Budget(self._max_seconds))

    def _compile(self, lark: str, what: str, param: str, left: str = "") -> llguidance.LLMatcher:
        """Compile a grammar, in which a `oneOf` may be left, for this reason."""
        tokenizer = self.tokenizer
        matcher = _with_large_stack(lambda: llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=_LIMITS))
        if matcher.is_error():
            error = matcher.get_error()
            raise _refusal(what, left if left and "oneOf constraints" in error else error, param)
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
        """The vocabulary as llguidance reads it."""
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
    """Compile in a thread: the compiler recurses for each subschema, and a stack overflow ends the process.

    Raises:
        RuntimeError: the compiler failed for another reason than the grammar; its cause says which.
    """
    # The size is the whole process's, and two requests may be compiled at a time.
    with _STACK_SIZE, ThreadPoolExecutor(1, "compiler") as pool:
        before = threading.stack_size(_STACK_BYTES)
        try:
            compiled = pool.submit(compile_one)
        finally:
            threading.stack_size(before)
    if (cause := compiled.exception()) is not None:
        # A panic of llguidance is no `Exception`, and would end the thread that waits.
        raise RuntimeError("the compiler of grammars has failed") from cause
    return compiled.result()


def _with_options(schema: str, options: Mapping[str, Any]) -> str:
    """Add the compiler's options to a schema."""
    text = json.dumps(options)
    return f'{{"x-guidance": {text}, {schema[1:]}' if schema != "{}" else f'{{"x-guidance": {text}}}'


def _relaxed(schema: dict[str, Any], without: frozenset[str] = frozenset()) -> ReadSchema:
    """Read a schema without what cannot be asserted of it."""
    try:
        return read_schema(schema, relaxes=True, without=without)
    except UnusableSchema:
        return _ANY_OBJECT


def _names(relaxed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Name keywords with their tools, or if they are many without."""
    names = [f"tools.{tool}.{key}" for tool, keys in relaxed.items() for key in keys]
    if len(names) > _MAX_NAMES:
        names = sorted({f"tools.{key}" for keys in relaxed.values() for key in keys})
    return tuple(names)


def _refusal(what: str, reason: object, param: str) -> RequestError:
    message = f"The {what} cannot be used: {in_one_line(str(reason)).rstrip('.')}."
    return RequestError(message, param=param, code="invalid_value")
