"""OpenAI's response objects and stream events, made from generations."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from specserve.api import response_schema as schema
from specserve.api.answer import AnswerReader, Arguments, Call, Part, Reasoning, Text
from specserve.api.logprobs import (
    Position,
    chat_logprobs,
    completion_logprobs,
    output_positions,
    prompt_positions,
)
from specserve.api.resolve import ResponseForm
from specserve.api.response_schema import FinishReason, ResponseObject, as_json
from specserve.api.speculation import speculation_of
from specserve.core.generation import Generation
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SequenceStats, Source

_END = "data: [DONE]\n\n"


class Response:
    """Holds the response to one request, complete unless generations write it, and what the client has of it.

    Args:
        body: its JSON object.
        status: its HTTP status.
        generations: the sequences that it is made of.
    """

    streams = False
    # What a stream sends where it has nothing to say; no client takes it for content.
    keep_alive: ClassVar[str] = ": \n\n"

    def __init__(
        self,
        body: ResponseObject | Mapping[str, Any] | None = None,
        *,
        status: int = 200,
        generations: Sequence[Generation] = (),
    ) -> None:
        self.generations = generations
        self.status_sent = False
        # When something is sent at the latest, by time.monotonic().
        self.silent_until = 0.0
        # Sent with the status; the names of what was ignored become one.
        self.headers: dict[str, str] = {}
        self.ignored: Sequence[str] = ()
        self._status = status
        self._body = body or {}
        self._failed: RequestError | None = None

    def fail(self, error: RequestError) -> None:
        """Make it the response to a request that has failed, whatever its generations say."""
        self._failed = error

    @staticmethod
    def error_body(error: RequestError) -> ResponseObject | Mapping[str, Any]:
        """Return the body of the response to a request that is refused or fails."""
        detail = schema.ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
        return schema.ErrorResponse(error=detail)

    @classmethod
    def refusal(cls, error: RequestError) -> Response:
        """Make the response to a request that is refused, in the protocol of the class."""
        return Response(cls.error_body(error), status=error.status)

    @property
    def error(self) -> RequestError | None:
        """What it has failed with, or else the error of the first generation that has one."""
        return self._failed or next((generation.error for generation in self.generations if generation.error), None)

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.error is not None or all(generation.done for generation in self.generations)

    @property
    def status(self) -> int:
        """The HTTP status, as far as is known."""
        return self.error.status if self.error else self._status

    def text(self) -> str:
        """Return the whole JSON object as text; the response must be done."""
        return as_json(self.error_body(self.error) if self.error else self._body)

    def next_events(self) -> str:
        """Return the events of a stream since the last call; '' of a response that is no stream."""
        return ""


class GenerationResponse(Response):
    """Knows what the response of a route that generates consists of, whatever its protocol.

    Args:
        form: what it consists of.
        candidates: by prompt, the generations of which the best are returned.
        vocabulary: the target's.
        request_id: TorchServe's.
        model: the id that the request has named.
    """

    def __init__(
        self,
        form: ResponseForm,
        candidates: list[list[Generation]],
        *,
        vocabulary: Vocabulary,
        request_id: str,
        model: str,
    ) -> None:
        super().__init__(generations=[generation for group in candidates for generation in group])
        self.streams = form.stream
        self._form = form
        self.ignored = form.relaxed
        self._candidates = candidates
        self._vocabulary = vocabulary
        self._request_id = request_id
        self._model = model
        self._created = int(time.time())
        # By generation, what reads its text.
        self._readers: dict[Generation, AnswerReader] = {}

    def _parts(self, index: int, generation: Generation) -> list[Part]:
        """Read the new parts of a choice, those since the last call; the choices of a request are read alike."""
        del index
        form, reader = self._form, self._readers.get(generation)
        if reader is None:
            reader = AnswerReader(form.call_forms, form.tools, form.thinking, begun=form.thinks_at_once)
            self._readers[generation] = reader
        return reader.read(generation.take_text(), done=generation.done)

    def _finish_reason(self, index: int, generation: Generation) -> FinishReason | None:
        """Tell why a choice has ended, as far as it is read: `tool_calls` if it has any and the last is not cut."""
        del index
        reader = self._readers.get(generation)
        has_calls = reader is not None and reader.calls > 0 and not reader.is_within_call
        return "tool_calls" if generation.finish_reason == "stop" and has_calls else generation.finish_reason

    def _usage(self, stats: SequenceStats) -> schema.Usage:
        """Count the tokens of all candidates so far."""
        prompt_tokens = sum(group[0].prompt_length for group in self._candidates)
        cached_tokens = sum(group[0].cached_tokens for group in self._candidates)
        completion_tokens = sum(generation.generated for generation in self.generations)
        predicted, accepted = stats.drafted_by["prediction"], stats.accepted_by["prediction"]
        reasoning = sum(generation.tokens_within(reader.reasoned) for generation, reader in self._readers.items())
        return schema.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=schema.PromptDetails(cached_tokens=cached_tokens),
            completion_tokens_details=schema.CompletionDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=predicted - accepted,
                **({"reasoning_tokens": reasoning} if self._form.thinking else {}),
            ),
        )

    def _totals(self) -> dict[str, Any]:
        """Count what all candidates took, for the fields `usage` and `speculation`."""
        stats = self._stats()
        speculation = speculation_of(stats, self.generations[0].speculation)
        return {"usage": self._usage(stats), "speculation": speculation}

    def _stats(self) -> SequenceStats:
        return SequenceStats.total(generation.stats for generation in self.generations)


class ChoicesResponse(GenerationResponse, ABC):
    """Writes OpenAI's responses that consist of choices, whole or as a stream."""

    prefix: ClassVar[str]
    # The object of the whole response, and of an event.
    objects: ClassVar[tuple[type[schema.GeneratedObject[Any]], type[schema.GeneratedObject[Any]]]]
    # Whether the first event of a choice says something even without text.
    begins_with_role: ClassVar[bool] = False

    def __init__(self, form: ResponseForm, candidates: list[list[Generation]], **options: Any) -> None:
        super().__init__(form, candidates, **options)
        kind = self.objects[self.streams]
        [name] = get_args(kind.model_fields["object"].annotation)
        response_id = f"{self.prefix}-{self._request_id}"
        self._object = partial(kind, id=response_id, object=name, created=self._created, model=self._model)
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        # By choice, who wrote what, of text that is held back since it may belong to a call or to the reasoning.
        self._sources: dict[int, list[tuple[str, Source | Literal["prompt"]]]] = {}

    @abstractmethod
    def _choice(self, parts: list[Part] | None, *, first: bool, fields: Mapping[str, Any]) -> ResponseObject:
        """Make a choice of the response or of an event.

        Args:
            parts: what is new; None at the end of a stream, whose last event has no text as in OpenAI's.
            first: whether it begins the choice.
            fields: those that the choices of all routes have.
        """

    @abstractmethod
    def _logprobs(self, positions: list[Position]) -> ResponseObject:
        """Make the log-probabilities of these tokens."""

    def text(self) -> str:
        """Return the whole response, or the error object, as JSON text."""
        if self.error:
            return as_json(self.error_body(self.error))
        best = [generation for group in self._candidates for generation in self._best(group)]
        choices = [self._new(index, generation) for index, generation in enumerate(best)]
        return as_json(self._object(choices=choices, **self._totals()))

    def next_events(self) -> str:
        """Return the stream's events since the last call, '' where nothing is new; when done, the end of the stream."""
        if self.error:
            return _event(self.error_body(self.error)) + _END
        choices = [new for index, generation in enumerate(self.generations) for new in self._news(index, generation)]
        usage: dict[str, Any] = {"usage": None} if self._form.include_usage else {}
        if choices and self._form.continuous_usage:
            usage = {"usage": self._usage(self._stats())}
        events = "".join(_event(self._object(choices=[choice], **usage)) for choice in choices)
        if len(self._ended) == len(self.generations):
            if self._form.include_usage:
                events += _event(self._object(choices=[], **self._totals()))
            events += _END
        return events

    def _news(self, index: int, generation: Generation) -> Iterator[ResponseObject]:
        """Make the choices of the events since the last call, for one choice of the response."""
        has_news = generation.has_text or generation.done
        if index in self._ended or not has_news or not self._prompt_is_scored(index):
            return
        new = self._new(index, generation)
        if new is not None:
            yield new
        if generation.done:
            self._ended.add(index)
            reason = self._finish_reason(index, generation)
            end: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
            sources = {"sources": self._sources.pop(index, [])} if self._form.sources else {}
            yield self._choice(None, first=False, fields=end | sources)

    def _new(self, index: int, generation: Generation) -> ResponseObject | None:
        """Make what is new of a choice, at first with a prompt that is echoed; None if a stream has nothing to say."""
        form, number = self._form, index // self._form.choices
        first = index not in self._begun
        self._begun.add(index)
        echo = form.prompts[number] if form.echo else None
        repeated = echo.text if echo and first else ""
        parts = self._parts(index, generation)
        reason = None if self.streams else self._finish_reason(index, generation)
        fields: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        positions: list[Position] = []
        if form.top_logprobs is not None:
            positions = output_positions(generation.take_tokens(), len(echo.text) if echo else 0)
            if echo and first:
                scores = self._candidates[number][0].prompt_scores
                positions = prompt_positions(echo, scores, self._vocabulary) + positions
            fields["logprobs"] = self._logprobs(positions)
        if form.sources:
            pieces = self._sources.setdefault(index, [(repeated, "prompt")] if repeated else [])
            pieces += generation.by_source()
        if self.streams and not (repeated or parts or positions or (first and self.begins_with_role)):
            return None
        if form.sources:
            fields["sources"] = self._sources.pop(index)
        return self._choice([Text(repeated), *parts] if repeated else parts, first=first, fields=fields)

    def _best(self, group: list[Generation]) -> list[Generation]:
        """Choose the candidates with the highest mean log-probability; in their order if all are returned."""
        count = self._form.choices
        return group if count == len(group) else sorted(group, key=lambda candidate: -candidate.mean_logprob)[:count]

    def _prompt_is_scored(self, index: int) -> bool:
        """Tell whether all scores for the first chunk are there; another choice may be ahead of the scored one."""
        scored = self._candidates[index // self._form.choices][0]
        return not scored.scores_prompt or len(scored.prompt_scores) == scored.prompt_length - 1


class CompletionResponse(ChoicesResponse):
    """Writes the response of v1/completions."""

    prefix = "cmpl"
    objects = schema.Completion, schema.CompletionChunk

    def _choice(self, parts: list[Part] | None, *, first: bool, fields: Mapping[str, Any]) -> ResponseObject:
        del first  # Only a chat's choices begin with something else.
        return schema.CompletionChoice(text=_text(parts or []), **fields)

    def _logprobs(self, positions: list[Position]) -> ResponseObject:
        return completion_logprobs(positions, self._vocabulary, top=self._form.top_logprobs or 0)


class ChatResponse(ChoicesResponse):
    """Writes the response of v1/chat/completions."""

    prefix = "chatcmpl"
    objects = schema.ChatCompletion, schema.ChatCompletionChunk
    begins_with_role = True

    def _choice(self, parts: list[Part] | None, *, first: bool, fields: Mapping[str, Any]) -> ResponseObject:
        if parts is None:
            return schema.ChatChunkChoice(delta=schema.ChatDelta(), **fields)
        text, calls = _text(parts), self._calls(parts)
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        others = calls | ({"reasoning_content": reasoning} if reasoning else {})
        if not self.streams:
            content = text if text or not calls else None
            message = schema.ChatMessage(role="assistant", content=content, refusal=None, **others)
            return schema.ChatChoice(message=message, **fields)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"content": text} if text or first or not others else {}
        return schema.ChatChunkChoice(delta=schema.ChatDelta(**delta, **others), **fields)

    def _calls(self, parts: list[Part]) -> dict[str, Any]:
        """Make the field of the calls, if there is anything of any; an event has each call once."""
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {"id": part.id, "type": "function", "function": function}
            elif isinstance(part, Arguments):
                call = calls.setdefault(part.index, {"function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        written = [({"index": index} if self.streams else {}) | call for index, call in calls.items()]
        return {"tool_calls": [schema.ToolCall.model_validate(call) for call in written]} if written else {}

    def _logprobs(self, positions: list[Position]) -> ResponseObject:
        return chat_logprobs(positions, self._vocabulary)


def _text(parts: list[Part]) -> str:
    """Join the text among the parts."""
    return "".join(part.text for part in parts if isinstance(part, Text))


def _event(data: ResponseObject | Mapping[str, Any]) -> str:
    """Write one server-sent event."""
    return f"data: {as_json(data)}\n\n"
