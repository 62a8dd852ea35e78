"""A sequence as its client sees it: its text, why it ended, and when."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Literal

from specserve.core.detokenizer import Detokenizer
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.observability.records import EndRecord
from specserve.sequence import Sequence, Source, TokenScore

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TextParams:
    """How an answer's tokens become text, and what ends it but for EOS and its last allowed token."""

    stops: Iterable[str] = ()
    # They end the answer as EOS does; by token, the stop string that is its name, or ''.
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    includes_stop: bool = False  # the text has the stop string or token that ends it
    spells_control: bool = False  # the text has the names of control tokens
    tags: Mapping[int, str] = field(default_factory=dict)  # texts of control tokens that are read as text
    # Since the first token; then the answer ends with its line, as by llama.cpp's `t_max_predict_ms`. 0 is no limit.
    max_seconds: float = 0.0


@dataclass(eq=False, repr=False)
class TextSequence(Sequence):
    """A sequence that is turned into text, up to EOS, a stop string or token, or the last allowed token."""

    vocabulary: Vocabulary
    text: TextParams = TextParams()
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__post_init__()
        nothing_to_do = self.max_tokens == 0 and not self.scores_prompt
        self.finish_reason: FinishReason | None = "length" if nothing_to_do else None
        self.error: RequestError | None = None
        self._detokenizer = Detokenizer(self.text.stops, includes_stop=self.text.includes_stop)
        self._named_stop = self._last_text = ""
        self._deadline = math.inf
        # Where the text of each token that was read begins, in characters, and that of the next one.
        self._offsets = [0]
        self._taken = 0  # tokens that `take_tokens` has returned

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def warm_cache(self) -> None:
        """Have the prompt prefilled even if no token is wanted."""
        self.finish_reason = None

    def fail(self, reason: Exception) -> None:
        """End with an error: a 500 if it is not the request's."""
        if not isinstance(reason, RequestError):
            sentence = "The model failed while it wrote this answer; please send the request again."
            reason = RequestError(sentence, status=500, kind="server_error")
        self.error = reason

    def end_record(self, now: float) -> EndRecord:
        """How it ended, for observers; without an end or an error it was cancelled."""
        times, ttft, tpot = self.timestamps, None, None
        if times.first_token is not None:
            ttft = times.first_token - times.arrival
            if self.generated > 1:
                tpot = (times.last_token - times.first_token) / (self.generated - 1) or None
        return EndRecord(
            self.info,
            self.index,
            reason="error" if self.error else self.finish_reason or "cancelled",
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_tokens,
            tokens=self.generated,
            preemptions=self.preemptions,
            waited=(now if times.start is None else times.start) - times.arrival,
            ttft=ttft,
            tpot=tpot,
        )

    def read_new_tokens(self) -> None:
        """Turn the tokens of the last round into text, and end at EOS, a stop string or the last allowed token.

        Tokens after the end are dropped, and so is EOS.
        """
        if self.generated and not self._read and self.text.max_seconds > 0:
            self._deadline = self.clock() + self.text.max_seconds
        while self.finish_reason is None and self._read < self.generated:
            token = self.tokens[self.prompt_length + self._read]
            may_stop = self._read >= self.sampling.min_tokens
            is_end, is_stop = self.vocabulary.is_end_token(token), may_stop and token in self.text.stop_tokens
            if is_stop and not is_end:
                self._named_stop = self.text.stop_tokens[token]
            if is_end or (is_stop and not self.text.includes_stop):
                self.end("stop", eos=True)
                return
            piece = self._piece(token)
            self._detokenizer.push(piece, may_stop=may_stop)
            self._offsets.append(self._detokenizer.length)
            if self.stop or is_stop or (self.constraint and self.constraint.complete(self.answer[: self._read])):
                self.end("stop")
            elif self._read >= self.max_tokens or (b"\n" in piece and self.clock() > self._deadline):
                self.end("length")

    @property
    def _read(self) -> int:
        """Number of tokens whose text is known."""
        return len(self._offsets) - 1

    def _piece(self, token: int) -> bytes:
        if token in self.text.tags:
            return self.text.tags[token].encode()
        return self.vocabulary.name(token) if self.text.spells_control else self.vocabulary.piece(token)

    def end(self, reason: FinishReason, *, eos: bool = False) -> None:
        """End with the tokens that were read; `eos` is whether an end token followed."""
        self.finish_reason = reason
        self._detokenizer.finish()
        if self._read:  # what is left of an incomplete character belongs to the last token
            self._offsets[-1] = self._detokenizer.length
        self.ended_by_eos = eos
        del self.tokens[self.prompt_length + self._read :], self.sources[self._read :], self.scores[self._read :]

    @property
    def stop(self) -> str:
        """The stop string that ended it, of several the longest; '' where another end came first."""
        return self._detokenizer.stop or self._named_stop

    @property
    def has_text(self) -> bool:
        return bool(self._detokenizer.ready)

    def take_text(self) -> str:
        self._last_text = self._detokenizer.take()
        return self._last_text

    def tokens_within(self, length: int) -> int:
        """How many tokens end within the first characters of the text."""
        return bisect_right(self._offsets, length, 1) - 1

    def by_source(self) -> list[tuple[str, Source]]:
        """What `take_text` has just returned, in a piece for each token that ended a character, and who wrote it."""
        pieces: list[tuple[str, Source]] = []
        text, offset = self._last_text, self._detokenizer.released - len(self._last_text)
        first, begin = self.tokens_within(offset), 0
        for end, source in zip(self._offsets[first + 1 :], self.sources[first:], strict=False):
            if begin >= len(text):
                break
            if piece := text[begin : end - offset]:
                pieces.append((piece, source))
            begin = end - offset
        return pieces

    def take_tokens(self) -> list[tuple[TokenScore, int]]:
        """The scored tokens whose text was released since the last call, and where in the output it begins.

        A token that a stop string cuts in two is one of them, a token after the cut is not.
        """
        tokens, released = [], self._detokenizer.released
        spans = pairwise(self._offsets[self._taken :])
        for (begin, end), score in zip(spans, self.scores[self._taken :], strict=False):
            if begin >= released if self._detokenizer.stop else end > released:
                break
            tokens.append((score, begin))
        self._taken += len(tokens)
        return tokens
