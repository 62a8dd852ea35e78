"""Grammars of tool calls: for an answer that is made of them, and for free text in which the model may open them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError
from specserve.grammar.arguments import ArgumentsGrammar
from specserve.grammar.call_form import (
    BETWEEN,
    ID,
    ID_PATTERN,
    MAX_SPACE,
    WHITESPACE,
    CallForm,
    ThinkingTags,
    as_bytes,
    find,
)
from specserve.grammar.constraint import BoolArray, Constraint
from specserve.grammar.notation import SPACE
from specserve.sequence import common_prefix


class CallSyntax(NamedTuple):
    """How a model writes calls: the forms in which they are read, its own first, and what it writes between blocks."""

    forms: tuple[CallForm, ...]
    joiner: str | None = ""  # None if an answer has one block

    def tags(self, vocabulary: Vocabulary) -> dict[int, str]:
        """Return the control tokens in the forms, which have no text, and their names."""
        return control_tokens((form.text for form in self.forms), vocabulary)


def control_tokens(texts: Iterable[str], vocabulary: Vocabulary) -> dict[int, str]:
    """Return the control tokens that texts name, and these names."""
    tokens = {token for text in texts for token in vocabulary.encode(text, special=True, begin=False)}
    names = {token: vocabulary.name(token).decode(errors="replace") for token in sorted(tokens)}
    return {token: name for token, name in names.items() if name and not vocabulary.piece(token)}


def call_grammar(
    syntax: CallSyntax,
    schemas: Mapping[str, Sequence[str]],
    vocabulary: Vocabulary,
    *,
    parallel: bool,
    is_whole: bool,
    otherwise: str | None = None,
) -> str:
    """Return llguidance's Lark for an answer in the model's own form if `is_whole`, else for a block in any form.

    `schemas` has two JSON schemas of each tool's arguments, as the compiler takes them: in the model's layout and in
    any. `otherwise` is the schema of a whole answer without calls.
    """
    spelled = {SPACE: "SPACE?", ID: f"/{ID_PATTERN}/"}
    spelled |= {name: f"<[{token}]>" for token, name in syntax.tags(vocabulary).items()}
    marks = "|".join(map(re.escape, spelled))
    # Names of rules by their bodies, so that tools share equal ones.
    rules: dict[str, str] = {}

    def rule(body: str, attribute: str = "") -> str:
        return rules.setdefault(f"{attribute}: {body}", f"rule_{len(rules)}")

    def fixed(form: str) -> str:
        """Return what spells a form without name and arguments."""
        return " ".join(spelled.get(part) or json.dumps(part) for part in re.split(f"({marks})", form) if part)

    def block(form: CallForm) -> str:
        before, middle, last = form.parts
        flexible = SPACE in form.call

        def arguments(schema: str) -> str:
            notation = form.notation
            body = ArgumentsGrammar(notation, json.loads(schema), rule, fixed).body if notation else "%json " + schema
            return rule(body)

        tools = (f"{fixed(name + middle)} {arguments(texts[flexible])}" for name, texts in schemas.items())
        call = rule(f"{fixed(before)} ({' | '.join(tools)}) {fixed(last)}")
        more = f"({fixed(form.separator)} {call})*" if parallel and form.separator is not None else ""
        return f"{fixed(form.begin)} {call} {more} {fixed(form.end)}"

    own, *_ = syntax.forms
    start = " | ".join(map(block, [own] if is_whole else syntax.forms))
    if is_whole and parallel and own.separator is None and syntax.joiner is not None:
        start = f"{rule(start)} ({fixed(syntax.joiner)} {rule(start)})*"
    if otherwise is not None:
        start = f"{start} | {rule('%json ' + otherwise)}"
    space = f"SPACE: /[ \\t\\r\\n]{{1,{MAX_SPACE}}}/"
    return "\n".join([f"start: {start}", space, *(name + body for body, name in rules.items())]) + "\n"


class _State(NamedTuple):
    # Of the open call, the tokens that spell its beginning, and the number of the answer's tokens up to there.
    begun: tuple[list[int], int] | None = None
    pending: str = ""  # in free text, what may have begun a call or tag
    first: bool = True  # whether no text stands between this and the last call or the beginning
    ended: bool = False  # whether nothing may follow
    reasons: bool | None = False  # whether it is reasoning, in which nothing opens a call; None before that is known


@dataclass(eq=False, kw_only=True)
class CallConstraint:
    """A constraint that leaves the model free until it opens a call, and then follows the grammar up to its end.

    Free text has no masks and takes no time of the grammar's budget. Like `Constraint`, a function of tokens alone.
    """

    call: Constraint  # the grammar of one block
    forms: Sequence[CallForm]  # in which a block may be written
    names: Container[str]  # of the tools
    vocabulary: Vocabulary  # the target's
    parallel: bool  # whether anything may follow a call
    thinking: ThinkingTags | None = None  # around reasoning; None if there is none
    thinks_at_once: bool = False  # whether the prompt ends with the first tag

    def __post_init__(self) -> None:
        self.relaxed = self.call.relaxed
        texts = [*(form.text for form in self.forms), *(self.thinking.texts if self.thinking else ())]
        names = control_tokens(texts, self.vocabulary)
        self._tags = {token: as_bytes(name) for token, name in names.items()}
        self._forms = [form.in_bytes() for form in self.forms]
        # The tokens that were asked about last, and the states before the first and after each of them.
        self._tokens: list[int] = []
        self._states = [_State(reasons=False if self.thinking is None else self.thinks_at_once or None)]

    def fork(self) -> CallConstraint:
        return replace(self, call=self.call.fork())

    def allowed(self, tokens: Sequence[int]) -> BoolArray | None:
        call = self._open_call(tokens)
        return None if call is None else self.call.allowed(call)

    def complete(self, tokens: Sequence[int]) -> bool:
        # After the only call that is wanted.
        return self._after(tokens).ended

    def forced(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        call = self._open_call(tokens)
        return [] if call is None else self.call.forced(call, max_tokens)

    def _open_call(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the tokens of the call that is open after `tokens`, from its first byte on."""
        begun = self._after(tokens).begun
        return None if begun is None else [*begun[0], *tokens[begun[1] :]]

    def _after(self, tokens: Sequence[int]) -> _State:
        tokens = list(tokens)
        shared = common_prefix(self._tokens, tokens)
        if shared < len(tokens):
            # Else what follows is kept: verification asks about drafts again, whose masks may not be computed twice.
            del self._states[shared + 1 :]
            for count in range(shared + 1, len(tokens) + 1):
                self._states.append(self._next(self._states[-1], tokens[:count]))
            self._tokens = tokens
        return self._states[len(tokens)]

    def _next(self, state: _State, tokens: list[int]) -> _State:
        """Return the state after `tokens`, whose last one follows `state`."""
        if state.ended:
            return state
        if state.begun is not None:
            begun, count = state.begun
            return self._unless_complete(state, [*begun, *tokens[count:]])
        text = state.pending + self._text(tokens[-1])
        if self.thinking is not None and state.reasons is not False:
            reasons, position = _reasoning_goes_on(self.thinking, text, state.reasons)
            text = text[position:]
            if reasons is not False:
                return _State(pending=text, reasons=reasons)
        position = -1
        while True:
            found = find(self._forms, text, self.names, start=position + 1, first=state.first, triggers=True)
            position = found.position
            if found.match is None:
                return _State(pending=text[position:], first=state.first and not text[:position].strip(BETWEEN))
            begun = self._last(tokens, len(text) - position)
            if begun and self._follows(begun):
                return self._unless_complete(_State((begun, len(tokens))), begun)

    def _unless_complete(self, state: _State, call: list[int]) -> _State:
        return _State(ended=not self.parallel) if self.call.complete(call) else state

    def _follows(self, call: list[int]) -> bool:
        """Whether what stands beyond a trigger belongs to a call; where the grammar fails, its next mask says so."""
        try:
            return self.call.follows(call)
        except ConstraintError:
            return True

    def _text(self, token: int) -> str:
        """Return a token's text with bytes as characters."""
        return self._tags.get(token) or self.vocabulary.piece(token).decode("latin-1")

    def _last(self, tokens: Sequence[int], length: int) -> list[int]:
        """Return the tokens of the last characters of an answer, single bytes for one that is cut."""
        found: list[int] = []
        for token in reversed(tokens):
            if length <= 0:
                break
            text = self._text(token)
            spelled = self.call.spell(text[-length:].encode("latin-1")) if len(text) > length else [token][: len(text)]
            found, length = [*spelled, *found], length - len(text)
        return found


def _reasoning_goes_on(tags: ThinkingTags, text: str, reasons: bool | None) -> tuple[bool | None, int]:
    """Tell whether an answer is still in its reasoning, and from which character on its text matters."""
    begin = 0 if reasons else tags.opening(text)
    if begin is None:
        return None, len(text) - len(text.lstrip(WHITESPACE))
    if begin < 0:
        return False, 0
    end = text.find(tags.end, begin)
    return (True, max(begin, len(text) - len(tags.end) + 1)) if end < 0 else (False, end + len(tags.end))
