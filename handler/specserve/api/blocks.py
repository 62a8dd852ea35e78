"""Answers as blocks one after the other, as v1/responses and v1/messages have them: reasoning, text, calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from specserve.api.answer import Arguments, Call, Reasoning, Text
from specserve.api.request_schema import GenerationRequest
from specserve.api.response import GenerationResponse
from specserve.errors import RequestError

# A JSON object with the field `type`, which also names the event.
Event = dict[str, Any]

_KINDS: dict[type, Literal["reasoning", "text", "call"]] = {
    Reasoning: "reasoning",
    Text: "text",
    Call: "call",
    Arguments: "call",
}


@dataclass
class Block:
    """A block of an answer: the how manieth, what it is, and its text as far as it came, a call's arguments as JSON."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call: Call | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(self.pieces)


def arguments_of(call: Block) -> dict[str, Any]:
    """Return the arguments of a call as far as they came; nothing of what is no JSON."""
    try:
        arguments = from_json(call.text or "{}", allow_partial="trailing-strings")
    except ValueError:  # such as half of a surrogate pair, which JSON can spell
        return {}
    return arguments if isinstance(arguments, dict) else {}


def generation_fields(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of any generation that a request sets, which its chat takes over."""
    return {name: getattr(request, name) for name in GenerationRequest.model_fields if name in request.model_fields_set}


class BlocksResponse(GenerationResponse, ABC):
    """Writes the one answer to a request as blocks; a stream's events and the whole response come from one reading."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks: list[Block] = []
        self._begun = False

    @abstractmethod
    def _whole(self) -> Event:
        """Return the whole response."""

    @abstractmethod
    def _failure(self, error: RequestError) -> Iterator[Event]:
        """Yield the last events of a stream that fails."""

    @abstractmethod
    def _beginning(self) -> Iterator[Event]:
        """Yield the first events of a stream, which come when its prompt is being read."""

    @abstractmethod
    def _end(self) -> Iterator[Event]:
        """Yield the last events of a stream, after those of the last block."""

    @abstractmethod
    def _block_beginning(self, block: Block) -> Iterator[Event]:
        """Yield the events that begin a block."""

    @abstractmethod
    def _block_news(self, block: Block, text: str) -> Iterator[Event]:
        """Yield the events of more text of a block."""

    @abstractmethod
    def _block_end(self, block: Block) -> Iterator[Event]:
        """Yield the events that end a block."""

    def text(self) -> str:
        """Return the whole response, or the error, as JSON text."""
        if self.error:
            return json.dumps(self.error_body(self.error))
        for _ in self._events():
            pass
        return json.dumps(self._whole())

    def next_events(self) -> str:
        """Return the stream's events since the last call, '' where nothing is new; when done, the end of the stream."""
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in self._events())

    def _events(self) -> Iterator[Event]:
        [generation] = self.generations
        # Agents' prompts are long, and their clients wait for a first event no longer than some minutes.
        if not (self.error or generation.timestamps.start is not None or generation.done):
            return
        if not self._begun:
            self._begun = True
            yield from self._beginning()
        if self.error:
            yield from self._failure(self.error)
            return
        for part in self._parts(generation):
            kind = _KINDS[type(part)]
            if isinstance(part, Call):
                yield from self._next_block(kind, part)
                continue
            if not self._blocks or self._blocks[-1].kind != kind:
                yield from self._next_block(kind)
            self._blocks[-1].pieces.append(part.text)
            yield from self._block_news(self._blocks[-1], part.text)
        if generation.done:
            # An answer without anything else is an empty text.
            if not self._blocks or self._blocks[-1].kind == "reasoning":
                yield from self._next_block("text")
            yield from self._block_end(self._blocks[-1])
            yield from self._end()

    def _next_block(self, kind: Literal["reasoning", "text", "call"], call: Call | None = None) -> Iterator[Event]:
        """End the last block, and begin another."""
        last = self._blocks[-1:]
        self._blocks.append(Block(len(self._blocks), kind, call))
        for block in last:
            yield from self._block_end(block)
        yield from self._block_beginning(self._blocks[-1])
