"""One answer in the making: its sequence, its text, and why it ended."""

from __future__ import annotations

from typing import Literal

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import Sequence
from specserve.serving.detokenizer import TextStream

FinishReason = Literal["stop", "length"]


class Generation:
    """A sequence together with the text its client sees."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary, stops: list[str]) -> None:
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self._vocabulary = vocabulary
        self._text = TextStream(stops)
        self._read = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def read_new_tokens(self) -> None:
        """Turn what a round decided into text, and end at EOS, a stop string or the last allowed token.

        Tokens behind the end are taken back; EOS itself is no part of the answer.
        """
        sequence = self.sequence
        while self.finish_reason is None and self._read < sequence.generated:
            token = sequence.tokens[sequence.prompt_length + self._read]
            if self._vocabulary.ends_text(token):
                self._end("stop")
                return
            self._read += 1
            self._text.push(self._vocabulary.piece(token))
            if self._text.stopped:
                self._end("stop")
            elif self._read >= sequence.max_tokens:
                self._end("length")

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._text.finish()
        self.sequence.truncate(self._read)

    def take_text(self) -> str:
        """The text that became certain since the last call."""
        return self._text.take()
