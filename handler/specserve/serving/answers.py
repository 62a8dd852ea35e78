"""What clients read: OpenAI's response objects and stream chunks, made of a generation."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from specserve.serving.generation import Generation
from specserve.serving.openai import GenerationRequest

JsonObject = dict[str, Any]


def sse(event: JsonObject) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(event)}\n\n"


SSE_END = "data: [DONE]\n\n"


class Answer(ABC):
    """The answer to one request, whole or as a stream of chunks.

    Args:
        plain_step_seconds: what one plain decode step takes, for the estimate of the speed-up.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        request: GenerationRequest,
        generation: Generation,
        *,
        identity: str,
        model: str,
        plain_step_seconds: float,
    ) -> None:
        self.generation = generation
        self.streams = bool(request.stream)
        self._options = request.stream_options
        self._head: JsonObject = {
            "id": f"{self.prefix}-{identity}",
            "object": self.chunk_object if self.streams else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._plain_step_seconds = plain_step_seconds

    @abstractmethod
    def _whole(self, text: str) -> JsonObject:
        """What a choice says beside its index and its end."""

    @abstractmethod
    def _piece(self, text: str) -> JsonObject:
        """What a chunk's choice says beside its index and its end."""

    def body(self) -> JsonObject:
        """The whole response; the generation must be done."""
        choice = self._choice(self._whole(self.generation.take_text()))
        return {**self._head, "choices": [choice], **self._totals()}

    def next_events(self) -> str:
        """The stream's events since the last call, '' where there is nothing new; the end of it when done."""
        generation = self.generation
        if generation.error is not None:
            return sse(dict(generation.error.body())) + SSE_END
        text = generation.take_text()
        events = ""
        usage = {"usage": None} if self._wants_usage else {}
        if text or generation.done:
            events = sse({**self._head, "choices": [self._choice(self._piece(text))], **usage})
        if generation.done:
            if self._wants_usage:
                events += sse({**self._head, "choices": [], **self._totals()})
            events += SSE_END
        return events

    def _choice(self, content: JsonObject) -> JsonObject:
        return {"index": 0, **content, "logprobs": None, "finish_reason": self.generation.finish_reason}

    @property
    def _wants_usage(self) -> bool:
        return self._options is not None and self._options.include_usage

    def _totals(self) -> JsonObject:
        sequence = self.generation.sequence
        return {
            "usage": {
                "prompt_tokens": sequence.prompt_length,
                "completion_tokens": sequence.generated,
                "total_tokens": len(sequence.tokens),
                "prompt_tokens_details": {"cached_tokens": sequence.reused},
            },
            "speculation": self._speculation(),
        }

    def _speculation(self) -> JsonObject:
        """The account of the request: what was drafted, and where the time went."""
        sequence = self.generation.sequence
        account = sequence.account
        decoding = account.decode_seconds
        # Plain decoding takes a step for every token but the first, which comes out of the prefill.
        plain = (account.rounds + account.accepted) * self._plain_step_seconds
        # Seconds that batch-mates share say nothing about one sequence alone.
        speedup = round(plain / decoding, 3) if decoding and not account.shared else None
        return {
            "mode": "fixed" if sequence.speculation.gamma else "off",
            "verification": sequence.speculation.verification,
            "rounds": account.rounds,
            "drafted_tokens": account.drafted,
            "accepted_tokens": account.accepted,
            "mean_acceptance_length": round(account.mean_acceptance_length, 3),
            "gamma_histogram": {str(gamma): count for gamma, count in sorted(account.gammas.items())},
            "drafters": {"model": {"drafted": account.drafted, "accepted": account.accepted}},
            "seconds": {
                "prefill": round(account.prefill_seconds, 6),
                "draft": round(account.draft_seconds, 6),
                "target": round(account.target_seconds, 6),
                "other": round(account.other_seconds, 6),
                "plain_estimate": round(plain, 6),
            },
            "estimated_speedup": speedup,
        }


class CompletionAnswer(Answer):
    """The answer of v1/completions.

    Args:
        echo: what the text begins with.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: GenerationRequest, generation: Generation, *, echo: str = "", **about: Any) -> None:
        super().__init__(request, generation, **about)
        self._echo = echo

    def _whole(self, text: str) -> JsonObject:
        return self._piece(text)

    def _piece(self, text: str) -> JsonObject:
        echo, self._echo = self._echo, ""
        return {"text": echo + text}


class ChatAnswer(Answer):
    """The answer of v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _begun = False

    def _whole(self, text: str) -> JsonObject:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> JsonObject:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return {"delta": {**role, "content": text} if text or role else {}}


def model_object(identity: str, created: int) -> JsonObject:
    """One entry of v1/models."""
    return {"id": identity, "object": "model", "created": created, "owned_by": "specserve"}


def model_list(identities: list[str], created: int) -> JsonObject:
    """The response of v1/models."""
    return {"object": "list", "data": [model_object(identity, created) for identity in identities]}
