"""A sequence as its client sees it: its text, why it ended, and when."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from specserve.core.detokenizer import Detokenizer
from specserve.engine.base import Vocabulary
from specserve.errors import ConstraintError, RequestError
from specserve.observability.records import EndRecord
from specserve.sequence import SamplingParams, Sequence, Source, SpeculationParams, TokenScore

FinishReason = Literal["stop", "length"]


class OutputToken(NamedTuple):
    """A scored token, and the offset of its text in the output, in characters."""

    score: TokenScore
    offset: int


@dataclass(frozen=True)
class TextParams:
    """How an answer's tokens become text, and what ends it but for EOS and its last allowed token.

    Args:
        stops: the stop strings.
        marks: of the control tokens that stand in stop strings, by token (detokenizer.py).
        stop_tokens: end the answer as EOS does.
        includes_stop: whether a stop string or token that ends the answer is part of its text.
        spells_control: whether the text has the names of control tokens.
        tags: the texts of control tokens that are read as text, by token.
        max_seconds: since its first token; later it ends with its next line, as by llama.cpp's `t_max_predict_ms`. Not
            limited if 0 or less.
    """

    stops: Iterable[str] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    stop_tokens: frozenset[int] = frozenset()
    includes_stop: bool = False
    spells_control: bool = False
    tags: Mapping[int, str] = field(default_factory=dict)
    max_seconds: float = 0.0


class Generation(Sequence):
    """A sequence that is turned into text, up to EOS, a stop string, or the last allowed token.

    Args:
        prompt: its tokens.
        sampling: how tokens are sampled.
        speculation: how they are drafted and verified.
        vocabulary: the target's.
        text: how they become text.
        clock: seconds.
        options: further arguments of `Sequence`.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        speculation: SpeculationParams,
        vocabulary: Vocabulary,
        text: TextParams = TextParams(),
        *,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        super().__init__(prompt, sampling, speculation, **options)
        nothing_to_do = self.max_tokens == 0 and not self.scores_prompt
        self.finish_reason: FinishReason | None = "length" if nothing_to_do else None
        self.error: RequestError | None = None
        # Over all tokens, an EOS token included: so an empty completion has one too.
        self.mean_logprob = -math.inf
        self._vocabulary = vocabulary
        self._params = text
        self._text = Detokenizer(text.stops, includes_stop=text.includes_stop)
        self._last_text = ""
        self._clock = clock
        self._deadline = math.inf
        # By token, the first and the last character of its text; the tokens that `take_tokens` has returned.
        self._spans: list[tuple[int, int]] = []
        self._taken = 0

    @property
    def done(self) -> bool:
        """Whether it has finished or failed."""
        return self.finish_reason is not None or self.error is not None

    def warm_cache(self) -> None:
        """Have the prompt prefilled even if no token is wanted."""
        self.finish_reason = None

    def fail(self, reason: Exception) -> None:
        """End with an error: a 400 if the grammar cannot be followed, else a 500."""
        if isinstance(reason, RequestError):
            self.error = reason
        elif isinstance(reason, ConstraintError):
            self.error = RequestError(f"{str(reason).rstrip('.')}.", code=reason.code)
        else:
            self.error = RequestError(
                "The model failed while it wrote this answer; please send the request again.",
                status=500,
                kind="server_error",
            )

    def end_record(self, now: float) -> EndRecord:
        """How it ended, for observers; without an end or an error it was cancelled."""
        times = self.timestamps
        ttft, tpot = None, None
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
        params = self._params
        if self.generated and not self._spans and params.max_seconds > 0:
            self._deadline = self._clock() + params.max_seconds
        while self.finish_reason is None and len(self._spans) < self.generated:
            token = self.tokens[self.prompt_length + len(self._spans)]
            is_stop = token in params.stop_tokens
            if self._vocabulary.is_end_token(token) or (is_stop and not params.includes_stop):
                self._end("stop", eos=True)
                return
            begin = self._text.length
            piece = self._piece(token)
            may_stop = len(self._spans) >= self.sampling.min_tokens
            self._text.push(piece, may_stop=may_stop)
            if token in params.marks:
                self._text.push_mark(params.marks[token], may_stop=may_stop)
            self._spans.append((begin, self._text.length))
            if self._text.stopped or is_stop or self._grammar_is_complete():
                self._end("stop")
            elif len(self._spans) >= self.max_tokens or (b"\n" in piece and self._clock() > self._deadline):
                self._end("length")

    def end_without_tokens(self) -> None:
        """End a sequence with `max_tokens` 0 whose prompt is prefilled."""
        self._end("length")

    def _piece(self, token: int) -> bytes:
        if token in self._params.tags:
            return self._params.tags[token].encode()
        return self._vocabulary.name(token) if self._params.spells_control else self._vocabulary.piece(token)

    def _grammar_is_complete(self) -> bool:
        return self.constraint is not None and self.constraint.complete(self.answer[: len(self._spans)])

    def _end(self, reason: FinishReason, *, eos: bool = False) -> None:
        self.finish_reason = reason
        self._text.finish()
        if self._spans:  # what is left of an incomplete character belongs to the last token
            self._spans[-1] = (self._spans[-1][0], self._text.length)
        scores = self.scores[: len(self._spans) + eos]
        self.mean_logprob = sum(score.logprob for score in scores) / len(scores) if scores else -math.inf
        self.ended_by_eos = eos
        self.truncate(len(self._spans))

    @property
    def has_text(self) -> bool:
        """Whether there is text to take."""
        return self._text.ready

    @property
    def stop(self) -> str:
        """The stop string that ended it, '' where another end came first; of several the longest."""
        stop = self._text.stop
        for token, mark in self._params.marks.items():
            stop = stop.replace(mark, self._vocabulary.name(token).decode(errors="replace"))
        return stop

    def take_text(self) -> str:
        """The text that was released since the last call."""
        self._last_text = self._text.take()
        return self._last_text

    def tokens_within(self, length: int) -> int:
        """How many tokens end within the first characters of the text."""
        return bisect_right(self._spans, length, key=itemgetter(1))

    def by_source(self) -> list[tuple[str, Source]]:
        """What `take_text` has just returned, in a piece for each token that ended a character, and who wrote it."""
        pieces: list[tuple[str, Source]] = []
        text, offset = self._last_text, self._text.released - len(self._last_text)
        begin = 0
        first = bisect_right(self._spans, offset, key=itemgetter(1))
        for (_, end), source in zip(self._spans[first:], self.sources[first:], strict=False):
            if begin >= len(text):
                break
            if piece := text[begin : end - offset]:
                pieces.append((piece, source))
            begin = end - offset
        return pieces

    def take_tokens(self) -> list[OutputToken]:
        """The scored tokens whose text was released since the last call.

        A token that a stop string cuts in two is one of them, a token after the cut is not.
        """
        tokens = []
        for (begin, end), score in zip(self._spans[self._taken :], self.scores[self._taken :], strict=False):
            if begin >= self._text.released if self._text.stopped else end > self._text.released:
                break
            tokens.append(OutputToken(score, begin))
        self._taken += len(tokens)
        return tokens
