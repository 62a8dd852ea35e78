"""One answer in the making: its sequence, its text, and why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError, RequestError
from specserve.observability.records import End, Origin
from specserve.sequence import Sequence
from specserve.serving.openai.logprobs import WrittenToken
from specserve.serving.openai.response_schema import FinishReason
from specserve.serving.openai.response_size import ResponseSize
from specserve.serving.openai.stream import TextStream


@dataclass
class Moments:
    """When a text came to the scheduler, began to be read, and was given its first and its last token so far."""

    submitted: float = 0.0
    begun: float | None = None
    first: float | None = None
    last: float = 0.0


class Generation:
    """A sequence together with the text its client sees."""

    def __init__(
        self,
        sequence: Sequence,
        vocabulary: Vocabulary,
        stops: list[str],
        origin: Origin | None = None,
        size: ResponseSize | None = None,
    ) -> None:
        self.sequence = sequence
        self.origin = origin or Origin()
        self.moments = Moments()
        nothing_to_do = sequence.max_tokens == 0 and not sequence.scores_prompt
        self.finish_reason: FinishReason | None = "length" if nothing_to_do else None
        self.error: RequestError | None = None
        # Of all tokens, the one that ends the text included: an empty answer is a choice like any other.
        self.mean_logprob = -math.inf
        self._vocabulary = vocabulary
        self._text = TextStream(stops)
        self._size = size or ResponseSize(vocabulary, chat=False)
        self._counted_prompt = 0
        self._spans: list[tuple[int, int]] = []
        self._given = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def fail(self, reason: Exception) -> None:
        """End the answer with an error: the request's, if its grammar cannot be followed, else the server's."""
        if isinstance(reason, ConstraintError):
            self.error = RequestError(str(reason), code="grammar_too_costly")
        else:
            self.error = RequestError(
                "The model failed while it wrote this answer; please send the request again.",
                status=500,
                kind="server_error",
            )

    def record(self, now: float) -> End:
        """How it ended; one that is not done was left by its client."""
        sequence, moments = self.sequence, self.moments
        reason = "error" if self.error else self.finish_reason or "cancelled"
        first, pace = moments.first, None
        if first is not None and sequence.generated > 1:
            pace = (moments.last - first) / (sequence.generated - 1)
        return End(
            self.origin,
            reason,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.reused,
            tokens=sequence.generated,
            waited=(now if moments.begun is None else moments.begun) - moments.submitted,
            first=None if first is None else first - moments.submitted,
            pace=pace or None,
        )

    def read_new_tokens(self) -> None:
        """Turn what a round decided into text, and end at EOS, a stop string or the last allowed token.

        Tokens behind the end are taken back; EOS itself is no part of the answer. An answer of no tokens ends when
        its prompt is read.
        """
        sequence = self.sequence
        if sequence.max_tokens == 0 and not sequence.target_pending:
            self._end("length")
        try:
            self._count_prompt_scores()
            self._read()
        except ConstraintError as error:
            self.fail(error)
        except RequestError as error:
            self.error = error

    def _count_prompt_scores(self) -> None:
        """Count the scores of the prompt that have come."""
        for score in self.sequence.prompt_scores[self._counted_prompt :]:
            self._size.add_prompt_score(score)
        self._counted_prompt = len(self.sequence.prompt_scores)

    def _read(self) -> None:
        sequence = self.sequence
        while self.finish_reason is None and len(self._spans) < sequence.generated:
            token = sequence.tokens[sequence.prompt_length + len(self._spans)]
            if self._vocabulary.is_end_token(token):
                self._end("stop", scored=len(self._spans) + 1)
                return
            begin = self._text.length
            piece = self._vocabulary.piece(token)
            self._text.push(piece)
            self._size.add_text(piece)
            if self.sequence.top_logprobs is not None:
                self._size.add_score(sequence.scores[len(self._spans)])
            self._spans.append((begin, self._text.length))
            if self._text.stopped or self._is_complete():
                self._end("stop")
            elif len(self._spans) >= sequence.max_tokens:
                self._end("length")

    def _is_complete(self) -> bool:
        constraint = self.sequence.constraint
        return constraint is not None and constraint.complete(self.sequence.answer[: len(self._spans)])

    def _end(self, reason: FinishReason, *, scored: int | None = None) -> None:
        """The answer is complete; the first `scored` scores are its tokens', by default those of its text."""
        self.finish_reason = reason
        self._text.finish()
        scores = self.sequence.scores[: len(self._spans) if scored is None else scored]
        self.mean_logprob = sum(score.logprob for score in scores) / len(scores) if scores else -math.inf
        self.sequence.truncate(len(self._spans), ended=scored is not None)

    @property
    def has_text(self) -> bool:
        """Whether there is text to take."""
        return self._text.ready

    def take_text(self) -> str:
        """The text that became certain since the last call."""
        return self._text.take()

    def take_tokens(self) -> list[WrittenToken]:
        """The scored tokens whose text became certain since the last call.

        A token that a stop string cut in two belongs to the text, one behind the cut does not.
        """
        tokens = []
        for (begin, end), score in zip(self._spans[self._given :], self.sequence.scores[self._given :], strict=False):
            if end > self._text.released and not (self.done and begin < self._text.released):
                break
            tokens.append(WrittenToken(score, begin))
        self._given += len(tokens)
        return tokens
