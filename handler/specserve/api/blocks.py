"""What v1/responses and v1/messages share: answers as blocks one after the other, of reasoning, text or a tool call."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from specserve.api.answer import Arguments, Call, Part, Reasoning, Text
from specserve.api.body import Body
from specserve.api.response import GenerationResponse
from specserve.errors import RequestError

# A JSON object with the field `type`, which also names the event.
Event = dict[str, Any]
Stage = Literal["begin", "more", "end"]
Kind = Literal["reasoning", "text", "call"]

_KINDS: dict[type, Kind] = {Reasoning: "reasoning", Text: "text", Call: "call", Arguments: "call"}


class TextForm(Body):
    """How a text is to be; `format` is validated as the `response_format` of a chat."""

    format: dict[str, Any] | None = None


@dataclass
class Block:
    """A block of an answer, and its text as far as it came; that of a tool call is the JSON of its arguments."""

    index: int
    kind: Kind
    call: Call | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as far as they came; none if that is no JSON object."""
        try:
            arguments = from_json(self.text or "{}", allow_partial="trailing-strings")
        except ValueError:  # such as half of a surrogate pair, which JSON can spell
            return {}
        return arguments if isinstance(arguments, dict) else {}


class BlocksResponse(GenerationResponse, ABC):
    """Writes the one answer to a request as blocks; a stream's events and the whole response come from one reading."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        [self._sequence] = self.sequences
        self._blocks: list[Block] = []
        self._begun = False
        self._response: Event = {}

    @abstractmethod
    def _complete(self) -> Event:
        """Return the whole response, once all blocks have been read."""

    @abstractmethod
    def _beginning(self) -> Iterator[Event]: ...

    @abstractmethod
    def _block_events(self, stage: Stage, block: Block, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def _end(self, response: Event) -> Iterator[Event]: ...

    def _failure(self, error: RequestError) -> Event:
        return self.error_body(error)

    def _whole(self) -> Event:
        for _ in self._events():
            pass
        return self._response

    def next_events(self) -> str:
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in self._events())

    def _events(self) -> Iterator[Event]:
        sequence = self._sequence
        # The first event comes when the prompt is being read: agents' clients wait for it some minutes at most.
        if not (self.error or sequence.timestamps.start is not None or sequence.done):
            return
        if not self._begun:
            self._begun = True
            yield from self._beginning()
        if self.error:
            yield self._failure(self.error)
            return
        for part in self._parts(sequence):
            yield from self._add(part)
        if sequence.done:
            # An answer without anything else is an empty text.
            if not self._blocks or self._blocks[-1].kind == "reasoning":
                yield from self._add(Text(""))
            yield from self._block_events("end", self._blocks[-1], "")
            self._response = self._complete()
            yield from self._end(self._response)

    def _add(self, part: Part) -> Iterator[Event]:
        """Add a part to the last block, or end that and begin the next one."""
        kind, blocks = _KINDS[type(part)], self._blocks
        if isinstance(part, Call) or not blocks or blocks[-1].kind != kind:
            ended = blocks[-1:]
            blocks.append(Block(len(blocks), kind, part if isinstance(part, Call) else None))
            for block in ended:
                yield from self._block_events("end", block, "")
            yield from self._block_events("begin", blocks[-1], "")
        if not isinstance(part, Call) and part.text:
            blocks[-1].pieces.append(part.text)
            yield from self._block_events("more", blocks[-1], part.text)
