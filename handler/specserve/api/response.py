"""The responses of all protocols: their interface to the handler, and what they have in common."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from specserve.api.answer import Part
from specserve.api.logprobs import check_size
from specserve.api.resolve import ResponseForm
from specserve.api.speculation import speculation_of
from specserve.core.generation import Generation
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SequenceStats

Json = dict[str, Any]
# Why an answer ended: by itself or at a stop string, at its last allowed token, or with tool calls.
FinishReason = Literal["stop", "length", "tool_calls"]


class Response:
    """The response to one request, complete unless generations write it, and what of it was sent."""

    streams = False
    keep_alive: ClassVar[str] = ": \n\n"  # what a silent stream sends; no client takes it for content
    ignored: Sequence[str] = ()  # names for the response header, beside those of the request

    def __init__(
        self, body: Mapping[str, Any] | None = None, *, status: int = 200, generations: Sequence[Generation] = ()
    ) -> None:
        self.generations = generations
        self.status_sent = False
        self.silent_until = 0.0  # the time of the next sign of life, by time.monotonic()
        self.headers: dict[str, str] = {}  # sent with the status
        self._status = status
        self._body = body or {}
        self._failed: RequestError | None = None

    def fail(self, error: RequestError) -> None:
        self._failed = error

    @staticmethod
    def error_body(error: RequestError) -> Json:
        return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}

    @classmethod
    def refusal(cls, error: RequestError) -> Response:
        """Return the response to a refused request, in this protocol."""
        return Response(cls.error_body(error), status=error.status)

    @property
    def error(self) -> RequestError | None:
        return self._failed or next((generation.error for generation in self.generations if generation.error), None)

    @property
    def done(self) -> bool:
        return self.error is not None or all(generation.done for generation in self.generations)

    @property
    def status(self) -> int:
        """The HTTP status, as far as is known."""
        return self.error.status if self.error else self._status

    def text(self) -> str:
        """Return the whole response, or the error, as JSON text; the response must be done."""
        text = json.dumps(self.error_body(self.error) if self.error else self._whole())
        check_size(len(text))
        return text

    def _whole(self) -> Mapping[str, Any]:
        return self._body

    def next_events(self) -> str:
        """Return a stream's events since the last call, '' where nothing is new; when done, the end of the stream."""
        return ""


class GenerationResponse(Response):
    """A response that generations write, prompt by prompt, to a request that has named the model so."""

    def __init__(
        self,
        form: ResponseForm,
        generations: Sequence[Generation],
        *,
        vocabulary: Vocabulary,
        request_id: str,
        model: str,
    ) -> None:
        super().__init__(generations=generations)
        self.streams = bool(form.request.stream)
        self.ignored = form.relaxed
        self._form = form
        self._vocabulary = vocabulary
        self._request_id = request_id
        self._model = model
        self._created = int(time.time())
        self._readers = {generation: form.reader() for generation in generations}

    def _parts(self, generation: Generation) -> list[Part]:
        """Read the parts of an answer since the last call."""
        return self._readers[generation].read(generation.take_text(), done=generation.done)

    def _finish_reason(self, generation: Generation) -> FinishReason | None:
        """Return why an answer ended: with `tool_calls` if it has any and the last is complete."""
        reader = self._readers[generation]
        has_calls = reader.calls > 0 and not reader.is_within_call
        return "tool_calls" if generation.finish_reason == "stop" and has_calls else generation.finish_reason

    def _usage(self, stats: SequenceStats) -> Json:
        """Count the tokens so far; every prompt counts once."""
        firsts = [generation for generation in self.generations if generation.choice == 0]
        prompt_tokens = sum(generation.prompt_length for generation in firsts)
        completion_tokens = sum(generation.generated for generation in self.generations)
        predicted, accepted = stats.drafted_by["prediction"], stats.accepted_by["prediction"]
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        if self._form.thinking:
            readers = self._readers.items()
            details["reasoning_tokens"] = sum(
                generation.tokens_within(reader.reasoned) for generation, reader in readers
            )
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(generation.cached_tokens for generation in firsts)},
            "completion_tokens_details": details,
        }

    def _totals(self) -> Json:
        stats = self._stats()
        return {"usage": self._usage(stats), "speculation": speculation_of(stats, self.generations[0].speculation)}

    def _stats(self) -> SequenceStats:
        return SequenceStats.total(generation.stats for generation in self.generations)
