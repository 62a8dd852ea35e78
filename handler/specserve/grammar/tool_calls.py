"""Grammars of tool calls: for an answer that is made of them, and for free text in which the model may open them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError
from specserve.grammar.call_form import (
    ARGUMENTS,
    BETWEEN,
    MAX_SPACE,
    NAME,
    SPACE,
    WHITESPACE,
    CallForm,
    ThinkingTags,
    elements,
    find,
)
from specserve.grammar.constraint import BoolArray, Constraint
from specserve.sequence import common_prefix


class CallSyntax(NamedTuple):
    """How a model writes calls: the forms in which they are read, its own first, and what it writes between blocks."""

    forms: tuple[CallForm, ...]
    joiner: str = ""

    def tags(self, vocabulary: Vocabulary) -> dict[int, str]:
        """Return the control tokens in the forms, which have no text, and their names."""
        return control_tokens((form.text for form in self.forms), vocabulary)


def control_tokens(texts: Iterable[str], vocabulary: Vocabulary) -> dict[int, str]:
    """Return the control tokens that texts name, and these names."""
    tokens = {token for text in texts for token in vocabulary.encode(text, special=True, begin=False)}
    names = {token: vocabulary.name(token).decode(errors="replace") for token in sorted(tokens)}
    return {token: name for token, name in names.items() if name and not vocabulary.piece(token)}


class CallGrammar:
    """Writes the grammar of calls in llguidance's Lark.

    Args:
        schemas: by tool, the JSON schema of its arguments in the model's layout and in any, as the compiler takes it.
        tags: the control tokens that have names in the forms.
    """

    def __init__(self, schemas: Mapping[str, Sequence[str]], tags: Mapping[int, str]) -> None:
        self._schemas = schemas
        self._tags = {name: token for token, name in tags.items()}
        # Names of rules by their bodies, so that tools share equal ones.
        self._rules: dict[str, str] = {}

    def opened(self, syntax: CallSyntax, *, parallel: bool) -> str:
        """Return the grammar of one block in any form."""
        return self._grammar(" | ".join(self._block(form, parallel=parallel) for form in syntax.forms))

    def whole(self, syntax: CallSyntax, *, parallel: bool, otherwise: str | None = None) -> str:
        """Return the grammar of an answer of calls in the model's own form, or of JSON that follows another schema."""
        own, *_ = syntax.forms
        if parallel and own.separator is None:
            block = self._rule(self._block(own, parallel=True))
            start = f"{block} ({self._fixed(syntax.joiner)} {block})*"
        else:
            start = self._block(own, parallel=parallel)
        return self._grammar(start if otherwise is None else f"{start} | {self._rule('%json ' + otherwise)}")

    def _grammar(self, start: str) -> str:
        space = f"SPACE: /[ \\t\\r\\n]{{1,{MAX_SPACE}}}/"
        return "\n".join([f"start: {start}", space, *(f"{name}: {body}" for body, name in self._rules.items())]) + "\n"

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"rule_{len(self._rules)}")

    def _block(self, form: CallForm, *, parallel: bool) -> str:
        before, _, after = form.call.partition(NAME)
        middle, _, last = after.partition(ARGUMENTS)
        flexible = SPACE in form.call
        tools = " | ".join(
            f"{self._fixed(name + middle)} {self._rule('%json ' + schemas[flexible])}"
            for name, schemas in self._schemas.items()
        )
        call = self._rule(f"{self._fixed(before)} ({tools}) {self._fixed(last)}")
        more = f"({self._fixed(form.separator)} {call})*" if parallel and form.separator is not None else ""
        return f"{self._fixed(form.begin)} {call} {more} {self._fixed(form.end)}"

    def _fixed(self, form: str) -> str:
        """Return what spells a form without name and arguments."""
        tags = "|".join(map(re.escape, self._tags)) or r"(?!)"
        parts = [part for element in elements(form) for part in re.split(f"({tags})", element) if part]
        spelled = {SPACE: "SPACE?", **{name: f"<[{token}]>" for name, token in self._tags.items()}}
        return " ".join(spelled.get(part) or json.dumps(part) for part in parts)


# Tokens and their texts; None stands for what is left of a token.
Pieces = tuple[tuple[int | None, str], ...]


class _State(NamedTuple):
    """Where an answer is after some of its tokens.

    Args:
        begun: of the open call, the tokens that spell its beginning, and the number of the answer's tokens up to there;
            None in free text.
        pending: in free text, the tokens that may have begun a call, and their texts.
        first: whether no text stands between these and the last call or the beginning.
        ended: whether nothing may follow.
        reasons: whether it is reasoning, in which nothing opens a call; None before that is known.
    """

    begun: tuple[list[int], int] | None = None
    pending: Pieces = ()
    first: bool = True
    ended: bool = False
    reasons: bool | None = False


class CallConstraint:
    """A constraint that leaves the model free until it opens a call, and then follows the grammar up to its end.

    Free text has no masks and takes no time of the grammar's budget. Like `Constraint`, a function of tokens alone.

    Args:
        call: the grammar of one block.
        forms: of calls.
        names: of the tools.
        vocabulary: of the target.
        parallel: whether anything may follow a call.
        thinking: the tags around reasoning; None if there is none.
        thinks_at_once: whether the prompt ends with the first tag.
    """

    allows_text = True

    def __init__(
        self,
        call: Constraint,
        forms: Sequence[CallForm],
        names: Container[str],
        vocabulary: Vocabulary,
        *,
        parallel: bool,
        thinking: ThinkingTags | None = None,
        thinks_at_once: bool = False,
    ) -> None:
        self.relaxed = call.relaxed
        self._call = call
        self._forms = forms
        self._names = names
        self._vocabulary = vocabulary
        self._tags = control_tokens([*(form.text for form in forms), *(thinking or ())], vocabulary)
        self._parallel = parallel
        self._thinking = thinking
        # The tokens that were asked about last, and the states before the first and after each of them.
        self._tokens: list[int] = []
        self._states = [_State(reasons=False if thinking is None else thinks_at_once or None)]

    def allowed(self, tokens: Sequence[int]) -> BoolArray | None:
        """Return the mask of the tokens that may follow, None in free text; raises like `Constraint`."""
        call = self._open_call(tokens)
        return None if call is None else self._call.allowed(call)

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether nothing may follow: after the only call that is wanted."""
        return self._after(tokens).ended

    def forced(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return draft tokens for the text that the grammar forces inside calls; raises like `Constraint`."""
        call = self._open_call(tokens)
        return [] if call is None else self._call.forced(call, max_tokens)

    def fork(self) -> CallConstraint:
        """Return an independent constraint by the same grammar."""
        return CallConstraint(
            self._call.fork(),
            self._forms,
            self._names,
            self._vocabulary,
            parallel=self._parallel,
            thinking=self._thinking,
            thinks_at_once=self._states[0].reasons is True,
        )

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
        token = tokens[-1]
        if state.ended:
            return state
        if state.begun is not None:
            begun, count = state.begun
            return self._unless_complete(state, [*begun, *tokens[count:]])
        # Bytes as characters: what opens calls is ASCII.
        piece = self._tags.get(token) or self._vocabulary.piece(token).decode("latin-1")
        pending = (*state.pending, (token, piece)) if piece else state.pending
        if self._thinking is not None and state.reasons is not False:
            reasons, position = _reasoning_goes_on(self._thinking, _text(pending), state.reasons)
            pending = _since(pending, position)
            if reasons is not False:
                return _State(pending=pending, reasons=reasons)
        text, position = _text(pending), -1
        while True:
            found = find(self._forms, text, self._names, start=position + 1, first=state.first, triggers=True)
            position = found.position
            rest = _since(pending, position)
            if found.match is None:
                return _State(pending=rest, first=state.first and not text[:position].strip(BETWEEN))
            begun = self._spelled(rest)
            if begun and self._follows(begun):
                return self._unless_complete(_State((begun, len(tokens))), begun)

    def _unless_complete(self, state: _State, call: list[int]) -> _State:
        return _State(ended=not self._parallel) if self._call.complete(call) else state

    def _follows(self, call: list[int]) -> bool:
        """Whether what stands beyond a trigger belongs to a call; where the grammar fails, its next mask says so."""
        try:
            return self._call.follows(call)
        except ConstraintError:
            return True

    def _spelled(self, pieces: Pieces) -> list[int]:
        """Return the tokens of pieces, single bytes for one that is cut; none where bytes have no tokens."""
        spelled = (self._call.spell(piece.encode("latin-1")) if token is None else [token] for token, piece in pieces)
        return [token for tokens in spelled for token in tokens]


def _reasoning_goes_on(tags: ThinkingTags, text: str, reasons: bool | None) -> tuple[bool | None, int]:
    """Tell whether an answer is still in its reasoning, and from which character on its text matters."""
    begin = 0 if reasons else tags.opening(text)
    if begin is None:
        return None, len(text) - len(text.lstrip(WHITESPACE))
    if begin < 0:
        return False, 0
    end = text.find(tags.end, begin)
    return (True, max(begin, len(text) - len(tags.end) + 1)) if end < 0 else (False, end + len(tags.end))


def _text(pieces: Pieces) -> str:
    return "".join(piece for _, piece in pieces)


def _since(pieces: Pieces, position: int) -> Pieces:
    """Return the pieces of a text from a character on; one that is cut there has no token."""
    for index, (_, piece) in enumerate(pieces):
        if position < len(piece):
            return ((None, piece[position:]), *pieces[index + 1 :]) if position else pieces[index:]
        position -= len(piece)
    return ()
