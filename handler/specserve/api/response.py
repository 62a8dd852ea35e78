"""The responses of all protocols: their interface to the handler, and what they have in common."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from specserve.api.answer import Part
from specserve.api.body import Json
from specserve.api.logprobs import check_size
from specserve.api.resolve import ResponseForm
from specserve.api.speculation import speculation_of
from specserve.core.text_sequence import TextSequence
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SequenceStats


class Response:
    """The response to one request, complete unless sequences write it, and what of it was sent."""

    streams = False
    keep_alive: ClassVar[str] = ": \n\n"  # what a silent stream sends; no client takes it for content
    ignored: Sequence[str] = ()  # names for the response header, beside those of the request

    def __init__(
        self, body: Mapping[str, Any] | None = None, *, status: int = 200, sequences: Sequence[TextSequence] = ()
    ) -> None:
        self.sequences = sequences
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

    @property
    def error(self) -> RequestError | None:
        return self._failed or next((sequence.error for sequence in self.sequences if sequence.error), None)

    @property
    def done(self) -> bool:
        return self.error is not None or all(sequence.done for sequence in self.sequences)

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
    """A response that sequences write, ordered by prompt; `model` is the model's name as the request gives it."""

    def __init__(
        self,
        form: ResponseForm,
        sequences: Sequence[TextSequence],
        *,
        vocabulary: Vocabulary,
        request_id: str,
        model: str,
    ) -> None:
        super().__init__(sequences=sequences)
        self.streams = bool(form.request.stream)
        self.ignored = form.relaxed
        self._form = form
        self._vocabulary = vocabulary
        self._request_id = request_id
        self._model = model
        self._created = int(time.time())
        self._readers = {sequence: form.reader() for sequence in sequences}

    def _parts(self, sequence: TextSequence) -> list[Part]:
        return self._readers[sequence].read(sequence.take_text(), done=sequence.done)

    def _finish_reason(self, sequence: TextSequence) -> Literal["stop", "length", "tool_calls"] | None:
        """Return why an answer ended: with `tool_calls` if it has any and the last is complete."""
        reader = self._readers[sequence]
        has_calls = reader.calls > 0 and not reader.is_within_call
        return "tool_calls" if sequence.finish_reason == "stop" and has_calls else sequence.finish_reason

    def _usage(self, stats: SequenceStats) -> Json:
        """Count the tokens so far; every prompt counts once."""
        firsts = [sequence for sequence in self.sequences if sequence.choice == 0]
        prompt_tokens = sum(sequence.prompt_length for sequence in firsts)
        completion_tokens = sum(sequence.generated for sequence in self.sequences)
        predicted, accepted = stats.drafted_by["prediction"], stats.accepted_by["prediction"]
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        if self._form.thinking:
            readers = self._readers.items()
            details["reasoning_tokens"] = sum(sequence.tokens_within(reader.reasoned) for sequence, reader in readers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in firsts)},
            "completion_tokens_details": details,
        }

    def _totals(self) -> Json:
        stats = self._stats()
        return {"usage": self._usage(stats), "speculation": speculation_of(stats, self.sequences[0].speculation)}

    def _stats(self) -> SequenceStats:
        return SequenceStats.total(sequence.stats for sequence in self.sequences)
