"""OpenAI's response objects and stream events, made from generations."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, Literal

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SequenceStats
from specserve.serving.generation import Generation
from specserve.serving.openai.logprobs import chat_logprobs, completion_logprobs, joined, prompt_logprobs
from specserve.serving.openai.prompt import Prompt
from specserve.serving.openai.request_schema import AnyRequest, ChatRequest, CompletionRequest
from specserve.serving.openai.response_schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Model,
    ModelList,
    Sourced,
    Speculation,
    Totals,
    Usage,
)


class Response(ABC):
    """The response to one request, and whether the client has its status.

    Args:
        generations: the sequences that it is made of.
    """

    streams = False

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self.status_sent = False
        # When the status is sent at the latest, by time.monotonic().
        self.status_deadline = 0.0

    @property
    def error(self) -> RequestError | None:
        """The error of the first generation that has one."""
        return next((generation.error for generation in self.generations if generation.error), None)

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.error is not None or all(generation.done for generation in self.generations)

    @property
    def status(self) -> int:
        """The HTTP status, as far as is known."""
        return self.error.status if self.error else 200

    @abstractmethod
    def body(self) -> Mapping[str, Any]:
        """The whole JSON object; the response must be done."""

    def next_events(self) -> str:
        """The events of a stream since the last call; '' of a response that is no stream."""
        return ""


class JsonResponse(Response):
    """A response that is complete from the start: an error, or a route that generates nothing."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__([])
        self._status = status
        self._body = body

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._status

    def body(self) -> Mapping[str, Any]:
        """The JSON object."""
        return self._body


class GenerationResponse(Response, Generic[AnyRequest]):
    """The response of a route that generates, whole or as a stream.

    Args:
        request: as validated.
        prompts: its prompts.
        candidates: by prompt, the generations of which the best are returned.
        vocabulary: the target's.
        request_id: TorchServe's.
        model: the id that the request has named.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    # The text of a chunk that has none.
    nothing: ClassVar[Mapping[str, object]]

    def __init__(
        self,
        request: AnyRequest,
        prompts: list[Prompt],
        candidates: list[list[Generation]],
        *,
        vocabulary: Vocabulary,
        request_id: str,
        model: str,
    ) -> None:
        super().__init__([generation for group in candidates for generation in group])
        self.streams = bool(request.stream)
        self._request = request
        self._prompts = prompts
        self._candidates = candidates
        self._vocabulary = vocabulary
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self.chunk_object if self.streams else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    @abstractmethod
    def _whole(self, index: int, generation: Generation) -> Mapping[str, object]:
        """A choice of the whole response."""

    @abstractmethod
    def _delta(self, index: int, generation: Generation) -> Mapping[str, object] | None:
        """What is new of a choice, without its end; None if that is nothing."""

    def _end(self, index: int, generation: Generation) -> Mapping[str, object]:
        """A choice of the chunk that ends it, which in OpenAI's streams has no text."""
        end = {"index": index, **self.nothing, "logprobs": None, "finish_reason": generation.finish_reason}
        return {**end, **self._sources(generation, "")}

    def body(self) -> Mapping[str, Any]:
        """The whole response, or the error object."""
        if self.error:
            return self.error.body()
        best = [generation for group in self._candidates for generation in self._best(group)]
        choices = [self._whole(index, generation) for index, generation in enumerate(best)]
        return {**self._head, "choices": choices, **self._totals()}

    def next_events(self) -> str:
        """The stream's events since the last call, '' where there is nothing new; when done, the end of the stream."""
        if self.error:
            return _event(self.error.body()) + _END
        usage = {"usage": None} if self._wants_usage else {}
        choices = [new for index, generation in enumerate(self.generations) for new in self._news(index, generation)]
        events = "".join(_event({**self._head, "choices": [choice], **usage}) for choice in choices)
        if len(self._ended) == len(self.generations):
            if self._wants_usage:
                events += _event({**self._head, "choices": [], **self._totals()})
            events += _END
        return events

    def _news(self, index: int, generation: Generation) -> Iterator[Mapping[str, object]]:
        """The choices of the chunks since the last call, for one choice of the response."""
        has_news = generation.has_text or generation.done
        if index in self._ended or not has_news or not self._prompt_is_scored(index):
            return
        delta = self._delta(index, generation)
        if delta is not None:
            yield delta
        if generation.done:
            self._ended.add(index)
            yield self._end(index, generation)

    def _best(self, group: list[Generation]) -> list[Generation]:
        """The candidates with the highest mean log-probability; in their order if all are returned."""
        count = self._request.choices
        return group if count == len(group) else sorted(group, key=lambda one: -one.mean_logprob)[:count]

    def _sources(self, generation: Generation, text: str, echo: str = "") -> Sourced:
        """The field `sources` of text that was just taken, and of a prompt before it."""
        if not generation.keeps_sources:
            return {}
        prompt: list[tuple[str, Literal["prompt"]]] = [(echo, "prompt")] if echo else []
        return {"sources": [*prompt, *generation.by_source(text)]}

    def _prompt_of(self, index: int) -> int:
        return index // self._request.choices

    def _prompt_is_scored(self, index: int) -> bool:
        """Whether the prompt's scores for the first chunk are there; another choice may be ahead of the scored one."""
        scored = self._candidates[self._prompt_of(index)][0]
        return not scored.scores_prompt or len(scored.prompt_scores) == scored.prompt_length - 1

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and options.include_usage

    def _totals(self) -> Totals:
        stats = SequenceStats.total(generation.stats for generation in self.generations)
        return {"usage": self._usage(stats), "speculation": self._speculation(stats)}

    def _usage(self, stats: SequenceStats) -> Usage:
        prompt_tokens = sum(group[0].prompt_length for group in self._candidates)
        completion_tokens = sum(generation.generated for generation in self.generations)
        predicted = stats.accepted_by["prediction"]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(group[0].cached_tokens for group in self._candidates)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": predicted,
                "rejected_prediction_tokens": stats.drafted_by["prediction"] - predicted,
            },
        }

    def _speculation(self, stats: SequenceStats) -> Speculation:
        params = self.generations[0].speculation
        return {
            "mode": params.mode,
            "verification": params.verification,
            "rounds": stats.rounds,
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            "gamma_histogram": {str(gamma): count for gamma, count in sorted(stats.gammas.items())},
            "drafters": {
                name: {"drafted": drafted, "accepted": stats.accepted_by[name]}
                for name, drafted in stats.drafted_by.items()
            },
            "alternatives": {"read": stats.alternatives, "adopted": stats.adopted},
            "seconds": {
                "prefill": round(stats.prefill_seconds, 6),
                "draft": round(stats.draft_seconds, 6),
                "target": round(stats.target_seconds, 6),
                "other": round(stats.other_seconds, 6),
                "plain_estimate": round(stats.plain_seconds, 6),
            },
            "estimated_speedup": round(stats.plain_seconds / stats.decode_seconds, 3) if stats.decode_seconds else None,
        }


class CompletionResponse(GenerationResponse[CompletionRequest]):
    """The response of v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    nothing: ClassVar[Mapping[str, object]] = {"text": ""}

    def _whole(self, index: int, generation: Generation) -> CompletionChoice:
        return {**self._new(index, generation), "finish_reason": generation.finish_reason}

    def _delta(self, index: int, generation: Generation) -> CompletionChoice | None:
        new = self._new(index, generation)
        scored = new["logprobs"] is not None and new["logprobs"]["tokens"]
        return new if new["text"] or scored else None

    def _new(self, index: int, generation: Generation) -> CompletionChoice:
        """What is new of a choice; at first with the prompt, if it is echoed."""
        echo = self._prompts[self._prompt_of(index)].text if self._request.echo else ""
        first = index not in self._begun
        self._begun.add(index)
        repeated, text = echo if first else "", generation.take_text()
        return {
            "index": index,
            "text": repeated + text,
            "logprobs": self._logprobs(index, generation, shift=len(echo), first=first),
            "finish_reason": None,
            **self._sources(generation, text, repeated),
        }

    def _logprobs(self, index: int, generation: Generation, *, shift: int, first: bool) -> CompletionLogprobs | None:
        top = self._request.logprobs
        if top is None:
            return None
        output = completion_logprobs(generation.take_tokens(), self._vocabulary, top=top, shift=shift)
        if not (first and self._request.echo):
            return output
        prompt = self._prompts[self._prompt_of(index)]
        scores = self._candidates[self._prompt_of(index)][0].prompt_scores
        return joined(prompt_logprobs(prompt.text, prompt.tokens, scores, self._vocabulary, top=top), output)


class ChatResponse(GenerationResponse[ChatRequest]):
    """The response of v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: ClassVar[Mapping[str, object]] = {"delta": {}}

    def _whole(self, index: int, generation: Generation) -> ChatChoice:
        text = generation.take_text()
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(generation),
            "finish_reason": generation.finish_reason,
            **self._sources(generation, text),
        }

    def _delta(self, index: int, generation: Generation) -> ChatChunkChoice | None:
        first = index not in self._begun
        self._begun.add(index)
        text, logprobs = generation.take_text(), self._logprobs(generation)
        scored = logprobs is not None and logprobs["content"]
        if not (first or text or scored):
            return None
        delta: ChatDelta = {"role": "assistant", "content": text} if first else {"content": text}
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            **self._sources(generation, text),
        }

    def _logprobs(self, generation: Generation) -> ChatLogprobs | None:
        return chat_logprobs(generation.take_tokens(), self._vocabulary) if self._request.logprobs else None


def model_object(model_id: str, created: int) -> Model:
    """One entry of v1/models."""
    return {"id": model_id, "object": "model", "created": created, "owned_by": "specserve"}


def model_list(model_ids: list[str], created: int) -> ModelList:
    """The response of v1/models."""
    return {"object": "list", "data": [model_object(model_id, created) for model_id in model_ids]}


_END = "data: [DONE]\n\n"


def _event(data: Mapping[str, object]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
