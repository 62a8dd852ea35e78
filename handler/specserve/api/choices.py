"""OpenAI's responses that consist of choices: completions and chats, whole or as a stream."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from specserve.api.answer import Arguments, Call, Part, Reasoning, Text
from specserve.api.body import Json
from specserve.api.logprobs import Position, chat_logprobs, check_size, completion_logprobs, most_bytes, offsets_in
from specserve.api.prompt import Prompt
from specserve.api.request_schema import StreamOptions
from specserve.api.response import GenerationResponse
from specserve.core.text_sequence import TextSequence
from specserve.sequence import Source

_END = "data: [DONE]\n\n"


@dataclass
class _Choice:
    sequence: TextSequence
    prompt: Prompt
    scored: TextSequence  # the sequence that scores the prompt, if scores are wanted
    begun: bool = False
    ended: bool = False
    # Who wrote text that is held back, since it may belong to a call or to the reasoning.
    sources: list[tuple[str, Source | Literal["prompt"]]] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        """Whether something can be sent; the first event waits for all scores of the prompt."""
        scored, sequence = self.scored, self.sequence
        if self.ended or not (sequence.has_text or sequence.done):
            return False
        return not scored.scores_prompt or len(scored.prompt_scores) == scored.prompt_length - 1


class ChoicesResponse(GenerationResponse, ABC):
    prefix: ClassVar[str]
    objects: ClassVar[tuple[str, str]]  # the names of the whole response, and of an event
    begins_with_role: ClassVar[bool] = False  # whether the first event of a choice is sent even without text

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scored_bytes = 0  # at most, of the log-probabilities
        answers = self._form.request.answers
        self._choices = [
            _Choice(sequence, self._form.prompts[index // answers], self.sequences[index - sequence.choice])
            for index, sequence in enumerate(self.sequences)
        ]

    @abstractmethod
    def _content(self, parts: list[Part] | None, *, first: bool) -> Json:
        """Return the field of a choice with what is new; None at the end of a stream, which has no text as OpenAI's."""

    @abstractmethod
    def _logprobs(self, positions: list[Position]) -> Json: ...

    def _object(self, choices: list[Json]) -> Json:
        return {
            "id": f"{self.prefix}-{self._request_id}",
            "object": self.objects[self.streams],
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _whole(self) -> Json:
        return self._object([new for choice in self._choices for new in self._news(choice)]) | self._totals()

    def next_events(self) -> str:
        if self.error:
            return _event(self.error_body(self.error)) + _END
        options = self._form.request.stream_options or StreamOptions()
        choices = [new for choice in self._choices if choice.has_news for new in self._news(choice)]
        counts: Json = {"usage": None} if options.include_usage else {}
        if choices and options.continuous_usage_stats and counts:
            counts = {"usage": self._usage(self._stats())}
        events = "".join(_event(self._object([choice]) | counts) for choice in choices)
        if all(choice.ended for choice in self._choices):
            events += _event(self._object([]) | self._totals()) if options.include_usage else ""
            events += _END
        return events

    def _news(self, choice: _Choice) -> Iterator[Json]:
        """Yield a choice of the whole response, or of a stream what is new, at first an echoed prompt, and the end."""
        request, sequence, first = self._form.request, choice.sequence, not choice.begun
        choice.begun = True
        echo = choice.prompt if request.echo else None
        parts = self._parts(sequence)
        positions: list[Position] | None = None
        if request.scores is not None:
            shift = len(echo.text) if echo else 0
            positions = [Position(score.token, score, shift + offset) for score, offset in sequence.take_tokens()]
            if echo and first:
                offsets, scores = offsets_in(echo.text, echo.tokens, self._vocabulary), choice.scored.prompt_scores
                positions = [*map(Position, echo.tokens, [None, *scores], offsets), *positions]
        if echo and first and echo.text:
            parts = [Text(echo.text), *parts]
            choice.sources.append((echo.text, "prompt"))
        choice.sources += sequence.by_source() if request.speculation.sources else []
        if not self.streams or parts or positions or (first and self.begins_with_role):
            yield self._written(choice, parts, positions, first=first)
        if self.streams and sequence.done:
            choice.ended = True
            yield self._written(choice, None, None, first=False)

    def _written(
        self, choice: _Choice, parts: list[Part] | None, positions: list[Position] | None, *, first: bool
    ) -> Json:
        ends = parts is None or not self.streams
        self._scored_bytes += most_bytes(positions or [], self._vocabulary)
        check_size(self._scored_bytes)
        written = {
            "index": choice.sequence.index,
            **self._content(parts, first=first),
            "logprobs": None if positions is None else self._logprobs(positions),
            "finish_reason": self._finish_reason(choice.sequence) if ends else None,
        }
        if self._form.request.speculation.sources:
            written["sources"], choice.sources = choice.sources, []
        return written


class CompletionResponse(ChoicesResponse):
    prefix = "cmpl"
    objects = "text_completion", "text_completion"

    def _content(self, parts: list[Part] | None, *, first: bool) -> Json:
        del first  # only a chat's choices begin with something else
        return {"text": _text(parts or [])}

    def _logprobs(self, positions: list[Position]) -> Json:
        return completion_logprobs(positions, self._vocabulary, top=self._form.request.scores or 0)


class ChatResponse(ChoicesResponse):
    prefix = "chatcmpl"
    objects = "chat.completion", "chat.completion.chunk"
    begins_with_role = True

    def _content(self, parts: list[Part] | None, *, first: bool) -> Json:
        if parts is None:
            return {"delta": {}}
        text, calls = _text(parts), self._calls(parts)
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        others = ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        if not self.streams:
            content = text if text or not calls else None
            return {"message": {"role": "assistant", "content": content, "refusal": None, **others}}
        delta: Json = {"role": "assistant"} if first else {}
        delta |= {"content": text} if text or first or not others else {}
        return {"delta": delta | others}

    def _calls(self, parts: list[Part]) -> list[Json]:
        """Return the tool calls with news; an event has each call once."""
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, Call):
                place = {"index": part.index} if self.streams else {}
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = place | {"id": part.id, "type": "function", "function": function}
            elif isinstance(part, Arguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return [*calls.values()]

    def _logprobs(self, positions: list[Position]) -> Json:
        return chat_logprobs(positions, self._vocabulary)


def _text(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"
