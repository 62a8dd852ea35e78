"""What clients read: OpenAI's response objects and stream chunks, made of generations."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import Account, Tally
from specserve.serving.generation import Generation
from specserve.serving.openai.logprobs import chat_logprobs, completion_logprobs, joined, prompt_logprobs
from specserve.serving.openai.parse import Prompt
from specserve.serving.openai.response_schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Model,
    ModelList,
    Speculation,
    Totals,
    Usage,
)
from specserve.serving.openai.schema import ChatRequest, CompletionRequest
from specserve.serving.openai.validation import AnyRequest

Json = dict[str, Any]


def sse(event: Mapping[str, object]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(event)}\n\n"


SSE_END = "data: [DONE]\n\n"


class Answer(ABC, Generic[AnyRequest]):
    """The answer to one request, whole or as a stream of chunks.

    Args:
        candidates: for every prompt the generations of which the best are given.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        request: AnyRequest,
        prompts: list[Prompt],
        candidates: list[list[Generation]],
        *,
        vocabulary: Vocabulary,
        identity: str,
        model: str,
    ) -> None:
        self.streams = bool(request.stream)
        self.generations = [generation for group in candidates for generation in group]
        self._request = request
        self._prompts = prompts
        self._candidates = candidates
        self._vocabulary = vocabulary
        self._head: Json = {
            "id": f"{self.prefix}-{identity}",
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
    def _piece(self, index: int, generation: Generation) -> Mapping[str, object]:
        """A choice of a chunk."""

    @property
    def error(self) -> RequestError | None:
        """Why there is no answer."""
        return next((generation.error for generation in self.generations if generation.error), None)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(generation.done for generation in self.generations)

    def body(self) -> Json:
        """The whole response; the answer must be done."""
        best = [generation for group in self._candidates for generation in self._best(group)]
        choices = [self._whole(index, generation) for index, generation in enumerate(best)]
        return {**self._head, "choices": choices, **self._totals()}

    def next_events(self) -> str:
        """The stream's events since the last call, '' where there is nothing new; the end of it when done."""
        if self.error is not None:
            return sse(self.error.body()) + SSE_END
        events = ""
        usage = {"usage": None} if self._wants_usage else {}
        for index, generation in enumerate(self.generations):
            news = generation.has_text or generation.done
            if index in self._ended or not news or not self._prompt_is_scored(index):
                continue
            if generation.done:
                self._ended.add(index)
            events += sse({**self._head, "choices": [self._piece(index, generation)], **usage})
        if len(self._ended) == len(self.generations):
            if self._wants_usage:
                events += sse({**self._head, "choices": [], **self._totals()})
            events += SSE_END
        return events

    def _best(self, group: list[Generation]) -> list[Generation]:
        """The candidates whose tokens are the most probable, in the order they were asked for if all are given."""
        count = self._request.choices
        return group if count == len(group) else sorted(group, key=lambda one: -one.mean_logprob)[:count]

    def _prompt_of(self, index: int) -> int:
        return index // self._request.choices

    def _prompt_is_scored(self, index: int) -> bool:
        """Whether the scores are there that a first chunk shows; another choice may be ahead of the one that reads."""
        reader = self._candidates[self._prompt_of(index)][0].sequence
        return not reader.scores_prompt or len(reader.prompt_scores) == reader.prompt_length - 1

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and options.include_usage

    def _totals(self) -> Totals:
        return {"usage": self._usage(), "speculation": self._speculation()}

    def _usage(self) -> Usage:
        prompts = sum(group[0].sequence.prompt_length for group in self._candidates)
        written = sum(generation.sequence.generated for generation in self.generations)
        predicted = self._account().drafters.get("prediction", Tally())
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": sum(group[0].sequence.reused for group in self._candidates)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": predicted.accepted,
                "rejected_prediction_tokens": predicted.drafted - predicted.accepted,
            },
        }

    def _account(self) -> Account:
        return Account.total(generation.sequence.account for generation in self.generations)

    def _speculation(self) -> Speculation:
        """The account of the request: what was drafted, and where the time went."""
        account = self._account()
        params = self.generations[0].sequence.speculation
        plain = account.plain_seconds
        return {
            "mode": "auto" if params.adaptive else "fixed" if params.gamma else "off",
            "verification": params.verification,
            "rounds": account.rounds,
            "drafted_tokens": account.drafted,
            "accepted_tokens": account.accepted,
            "mean_acceptance_length": round(account.mean_acceptance_length, 3),
            "gamma_histogram": {str(gamma): count for gamma, count in sorted(account.gammas.items())},
            "drafters": {
                name: {"drafted": tally.drafted, "accepted": tally.accepted} for name, tally in account.drafters.items()
            },
            "seconds": {
                "prefill": round(account.prefill_seconds, 6),
                "draft": round(account.draft_seconds, 6),
                "target": round(account.target_seconds, 6),
                "other": round(account.other_seconds, 6),
                "plain_estimate": round(plain, 6),
            },
            "estimated_speedup": round(plain / account.decode_seconds, 3) if account.decode_seconds else None,
        }


class CompletionAnswer(Answer[CompletionRequest]):
    """The answer of v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _whole(self, index: int, generation: Generation) -> CompletionChoice:
        return self._piece(index, generation)

    def _piece(self, index: int, generation: Generation) -> CompletionChoice:
        echo = self._prompts[self._prompt_of(index)].text if self._request.echo else ""
        first = index not in self._begun
        self._begun.add(index)
        return {
            "index": index,
            "text": (echo if first else "") + generation.take_text(),
            "logprobs": self._logprobs(index, generation, shift=len(echo), first=first),
            "finish_reason": generation.finish_reason,
        }

    def _logprobs(self, index: int, generation: Generation, *, shift: int, first: bool) -> CompletionLogprobs | None:
        top = self._request.logprobs
        if top is None:
            return None
        answer = completion_logprobs(generation.take_tokens(), self._vocabulary, top=top, shift=shift)
        if not (first and self._request.echo):
            return answer
        prompt = self._prompts[self._prompt_of(index)]
        scores = self._candidates[self._prompt_of(index)][0].sequence.prompt_scores
        return joined(prompt_logprobs(prompt.text, prompt.tokens, scores, self._vocabulary, top=top), answer)


class ChatAnswer(Answer[ChatRequest]):
    """The answer of v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole(self, index: int, generation: Generation) -> ChatChoice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": generation.take_text(), "refusal": None},
            "logprobs": self._logprobs(generation),
            "finish_reason": generation.finish_reason,
        }

    def _piece(self, index: int, generation: Generation) -> ChatChunkChoice:
        delta: ChatDelta = {}
        if index not in self._begun:
            self._begun.add(index)
            delta["role"] = "assistant"
        text = generation.take_text()
        if text or delta:
            delta["content"] = text
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(generation),
            "finish_reason": generation.finish_reason,
        }

    def _logprobs(self, generation: Generation) -> ChatLogprobs | None:
        return chat_logprobs(generation.take_tokens(), self._vocabulary) if self._request.logprobs else None


def model_object(identity: str, created: int) -> Model:
    """One entry of v1/models."""
    return {"id": identity, "object": "model", "created": created, "owned_by": "specserve"}


def model_list(identities: list[str], created: int) -> ModelList:
    """The response of v1/models."""
    return {"object": "list", "data": [model_object(identity, created) for identity in identities]}
