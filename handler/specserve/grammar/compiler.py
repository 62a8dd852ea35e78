"""Compiles JSON schemas, tool calls and GBNF grammars for a vocabulary, and caches the compiled grammars."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any

import llguidance

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError, Unusable
from specserve.grammar.arguments import ArgumentsGrammar
from specserve.grammar.call_form import ThinkingTags
from specserve.grammar.constraint import Budget, CompiledGrammar, Constraint, in_one_line
from specserve.grammar.gbnf import MAX_TEXT as MAX_GRAMMAR_TEXT
from specserve.grammar.gbnf import gbnf_to_lark
from specserve.grammar.schema import MAX_SUBSCHEMAS, MAX_TEXT, ReadSchema, read_schema
from specserve.grammar.tool_calls import CallConstraint, CallSyntax, call_grammar

# Seconds of the engine's thread that the masks of a request may take; a mask of a real schema takes 0.1 to 1 ms.
MAX_SECONDS = 10.0
# llguidance's own forcing restricts the mask to one tokenisation of forced text, at a cost that grows with its length.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Without \\u: with it, an additional property could be spelled like a named one and escape its schema.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# At most 40 characters: small models tend to generate whitespace without end.
_FLEXIBLE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", **_ESCAPES}
# The layout of json.dumps, in which chat templates show tool calls.
_EXACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **_ESCAPES}
# Before a tool's name each is an item of the row (`max_items_in_row`), beside a few others.
MAX_TOOLS = 400
# Search for the tool at fault only among this many.
_TOOLS_TO_SEARCH = 64
# Keywords to drop from a tool's schema that cannot be compiled.
_COSTLY = frozenset({"pattern", "format", "patternProperties", "minProperties", "maxProperties", "multipleOf"})
# If more keywords are relaxed, name them without their tools.
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
# Of the compiler's thread: it recurses for each subschema, which takes 6 kB, schema.py allows 4,000 of them, and an
# overflow ends the process. Unused pages cost nothing.
_STACK_BYTES = 256 * 2**20
# An ordinary schema takes 1 to 5 MB, a grammar at the limits 100 MB.
_CACHED_GRAMMARS = 8


class GrammarCompiler:
    """Compiles schemas and grammars for a vocabulary; what it cannot take is a `RequestError`, a 400."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._round_budget = Budget()
        # Least recently used first.
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Build the index of the vocabulary before the first request: that takes 1.5 to 3.5 s for 151,936 tokens."""
        _ = self.tokenizer, self._thread

    def limit_masks(self, max_seconds: float) -> None:
        """Limit the time that all masks of the next round may take in the engine's thread; later ones are deferred."""
        self._round_budget.spent_seconds, self._round_budget.max_seconds = 0.0, max_seconds

    def json_schema(self, schema: dict[str, Any]) -> Constraint:
        """Return a constraint to JSON that is valid by a schema, with properties in the schema's order."""
        read = _read(schema, "JSON schema", "response_format")
        lark = f"{_HEADER}start: %json {_with_options(read, _FLEXIBLE)}\n"
        return self._constraint(lark, "JSON schema", "response_format", is_json=True)

    def calls(
        self,
        tools: Mapping[str, dict[str, Any]],
        syntax: CallSyntax,
        *,
        required: bool,
        parallel: bool,
        strict: Collection[str] = (),
        otherwise: dict[str, Any] | None = None,
        thinking: ThinkingTags | None = None,
        thinks_at_once: bool = False,
    ) -> Constraint | CallConstraint:
        """Return a constraint to tool calls, from the first token on or from where the model opens one.

        The schemas of `strict` tools are asserted as a whole; `relaxed` names what is not asserted of others. The JSON
        schema `otherwise` is that of an answer without calls, which None leaves free; then the model may reason before,
        within `thinking`, of which the prompt ends with the first tag if it `thinks_at_once`.
        """
        read: dict[str, ReadSchema] = {}
        for name, schema in tools.items():
            read[name] = next(_readings(name, schema, syntax, strict=name in strict))
            _check_size(read)
        is_free = not required and otherwise is None
        other = None
        if otherwise is not None and not required:
            if not syntax.forms[0].tag:
                raise _refusal("response format", "this model's calls look like any JSON", "response_format")
            other = _with_options(_read(otherwise, "JSON schema", "response_format"), _FLEXIBLE)

        def lark(some: Mapping[str, ReadSchema]) -> str:
            layouts = (_EXACT, _FLEXIBLE)
            texts = {name: [_with_options(schema, layout) for layout in layouts] for name, schema in some.items()}
            options: Any = {"parallel": parallel, "is_whole": not is_free, "otherwise": other}
            return _HEADER + call_grammar(syntax, texts, self._vocabulary, **options)

        try:
            call = self._constraint(lark(read), "tools", "tools", is_json=False)
        except RequestError:
            self.json_schema(otherwise or {})  # raises if that is at fault
            if len(read) > _TOOLS_TO_SEARCH:
                raise
            for name, schema in tools.items():
                readings = _readings(name, schema, syntax, strict=name in strict)
                read[name] = self._compilable(name, readings, lark)
            call = self._constraint(lark(read), "tools", "tools", is_json=False)
        names = [f"tools.{name}.{key}" for name, schema in read.items() for key in schema.relaxed]
        if len(names) > _MAX_NAMES:
            names = sorted({f"tools.{key}" for schema in read.values() for key in schema.relaxed})
        call.relaxed = tuple(names)
        if not is_free:
            return call
        return CallConstraint(
            call=call,
            forms=syntax.forms,
            names=frozenset(read),
            vocabulary=self._vocabulary,
            parallel=parallel,
            thinking=thinking,
            thinks_at_once=thinks_at_once,
        )

    def _compilable(
        self, name: str, readings: Iterator[ReadSchema], lark: Callable[[Mapping[str, ReadSchema]], str]
    ) -> ReadSchema:
        """Return the first reading of a tool's schema that can be compiled; raises why the last one cannot."""
        for schema in readings:
            try:
                self._compile(lark({name: schema}), f"tool '{name}'", "tools")
            except RequestError as error:
                failure = error
            else:
                return schema
        raise failure

    def gbnf(self, grammar: str) -> Constraint:
        try:
            lark = gbnf_to_lark(grammar)
        except Unusable as error:
            raise _refusal("grammar", error, "grammar") from error
        return self._constraint(_HEADER + lark, "grammar", "grammar", is_json=False)

    def regex(self, pattern: str) -> Constraint:
        """Return a constraint to text that a regular expression (of Rust's crate `regex`) matches as a whole."""
        if len(pattern) > MAX_GRAMMAR_TEXT:
            raise _refusal("regular expression", f"it is longer than {MAX_GRAMMAR_TEXT // 1024} KiB", "regex")
        # The whole text has to match, so anchors at its ends say nothing; an escaped `$` is none.
        whole = re.sub(r"^\^|(?<!\\)\$$", "", pattern)
        # A slash would end the expression, and Lark takes no line break in it.
        escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), whole)
        return self._constraint(f"{_HEADER}start: /{escaped}/\n", "regular expression", "regex", is_json=False)

    def _constraint(self, lark: str, what: str, param: str, *, is_json: bool) -> Constraint:
        """Return a constraint by a grammar, compiled or from the cache, with a budget of its own.

        A grammar whose lexer states are exhausted is compiled again for the next request: in llguidance 1.9
        LLMatcher.deep_copy shares them.
        """
        compiled = self._cache.pop(lark, None)
        if compiled is None or compiled.failures:
            matcher = self._compile(lark, what, param)
            compiled = CompiledGrammar(matcher, is_json, self._vocabulary, self._single_byte, self._round_budget, [])
        self._cache[lark] = compiled
        if len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return Constraint(compiled, Budget(MAX_SECONDS))

    def _compile(self, lark: str, what: str, param: str) -> llguidance.LLMatcher:
        compiling = self._thread.submit(llguidance.LLMatcher, self.tokenizer, lark, log_level=0, limits=_LIMITS)
        matcher = compiling.result()
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()
        error = trial.get_error() or "".join(matcher.get_grammar_warnings()[:1])
        if error:
            raise _refusal(what, error, param)
        return matcher

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        # The size holds for the whole process: a thread that starts at the same moment may get it, too.
        before = threading.stack_size(_STACK_BYTES)
        thread = ThreadPoolExecutor(1, "compiler")
        thread.submit(int).result()
        threading.stack_size(before)
        return thread

    @cached_property
    def _single_byte(self) -> dict[int, int]:
        pieces = enumerate(map(self._vocabulary.piece, range(self._vocabulary.size)))
        return {piece[0]: token for token, piece in pieces if len(piece) == 1}

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Pieces(self._vocabulary)), eos_token=self._vocabulary.end_tokens()
        )


class _Pieces:
    """The tokenizer interface that llguidance expects: the bytes of every token."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        end = vocabulary.end_tokens()
        self.eos_token_id = end[0]
        # An end token may also have a text, such as </s>, and must not match it in a grammar.
        self.tokens = [b"" if token in end else vocabulary.piece(token) for token in range(vocabulary.size)]

    def __call__(self, _text: bytes) -> list[int]:
        """Return nothing: without llguidance's forcing, no text is tokenised."""
        return []


def _with_options(schema: ReadSchema, options: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": options})[:-1] + ", " + schema.text[1:]


def _read(schema: dict[str, Any], what: str, param: str) -> ReadSchema:
    try:
        return read_schema(schema)
    except Unusable as error:
        raise _refusal(what, error, param) from error


def _readings(name: str, schema: dict[str, Any], syntax: CallSyntax, *, strict: bool) -> Iterator[ReadSchema]:
    """Yield a tool's schema as the compiler takes it; if it is not strict, then weaker and weaker ones."""
    what = f"tool '{name}'"
    if schema.get("type", "object") not in ("object", ["object"], None):
        raise _refusal(what, "its arguments have to be of the type 'object'", "tools")
    whole = {**schema, "type": "object"}
    if strict:
        read = _read(whole, what, "tools")
        if lost := _unasserted(read, syntax):
            raise _refusal(what, f"this model's calls cannot be held to {', '.join(lost)}", "tools")
        yield read
        return
    for without in (frozenset[str](), _COSTLY, _COSTLY | {"$ref"}):
        with suppress(Unusable):
            read = read_schema(whole, relaxes=True, without=without)
            yield read._replace(relaxed=tuple(dict.fromkeys([*read.relaxed, *_unasserted(read, syntax)])))
    yield ReadSchema('{"type": "object"}', relaxed=("parameters",))


def _unasserted(schema: ReadSchema, syntax: CallSyntax) -> Collection[str]:
    """Return the keywords that the grammar of the calls' notation cannot assert."""
    if (notation := syntax.forms[0].notation) is None:
        return ()
    return ArgumentsGrammar(notation, json.loads(schema.text), lambda *_: "rule", json.dumps).unasserted


def _check_size(tools: Mapping[str, ReadSchema]) -> None:
    if len(tools) > MAX_TOOLS:
        raise _refusal("tools", f"they are more than {MAX_TOOLS}", "tools")
    if sum(schema.size for schema in tools.values()) > MAX_SUBSCHEMAS:
        raise _refusal("tools", f"they have more than {MAX_SUBSCHEMAS} subschemas together", "tools")
    if sum(len(schema.text) for schema in tools.values()) > MAX_TEXT:
        raise _refusal("tools", f"they have more than {MAX_TEXT // 1024} KiB of schemas together", "tools")


def _refusal(what: str, reason: object, param: str) -> RequestError:
    message = f"The {what} cannot be used: {in_one_line(str(reason)).rstrip('.')}."
    return RequestError(message, param=param, code="invalid_value")
