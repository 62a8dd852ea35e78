"""Decides, round by round, what is drafted: the costs of this machine, and what texts have shown of their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specserve.sampling.distribution import is_greedy
from specserve.sequence import Sequence, Tally
from specserve.speculation.acceptance import Calibration, Outlook
from specserve.speculation.cost import Cost
from specserve.speculation.gamma import Prices

# What a draft of the model is worth before anything is known of a text.
_HOPE = 0.75
# By how sure a source is, least first: how often the draft was right, as measured with a pair of one family
# (benchmarks/simulate.py). What lookup says of itself is too high for most texts at first; the others are taken at
# their word.
_MODEL = (0.11, 0.3, 0.47, 0.7, 0.88, 0.95, 0.975, 0.99, 0.995)
_FROM_TARGET = (0.05, 0.2, 0.46, 0.68, 0.83, 0.9, 0.95, 0.98, 0.99)
_LOOKUP = (0.04, 0.12, 0.25, 0.42, 0.6, 0.75, 0.85, 0.92, 0.97)
_GUESS = (0.07, 0.18, 0.38, 0.62, 0.82, 0.92, 0.965, 0.985, 0.995)
_PRIORS = {"model": _MODEL, "target": _FROM_TARGET, "lookup": _LOOKUP}
# Arrears of up to this many tokens come back every round, and up to so many may be guesses that cost nothing, which the
# model has to read all the same; more are an investment.
_ARREARS = 4
_GUESSED = 24
# How much longer a text is taken to be than it is, and what may be lost on it.
_AHEAD = 48
_TOKENS_A_ROUND = 3
_FIRST_DRAFTS = 3
_LOSS = 0.01
_LOSS_STEPS = 4.0
# What reading up has to bring, in units of its cost: more each time that a text is given up and taken up again, and
# more where only the end of the text is read, since such drafts are worse.
_DUE = 1.75
_AGAIN = 1.25
_CUT = 1.4


class Lesson(NamedTuple):
    """A token that was drafted and reached: its source, how sure that was, and the probability that it stayed.

    `target_confidence` is how sure the target was of the place; None for a token that was thought of, but not drafted.
    """

    source: str
    confidence: float
    label: float
    target_confidence: float | None


class Burden(NamedTuple):
    """What one text adds to a round, in seconds by the cost model.

    Args:
        alone: its part of decoding without any drafts, or of reading prompts.
        drafts: what its drafts come to beyond that, in both models.
        reading_up: what the draft model reads of it for all rounds to come.
    """

    alone: float
    drafts: float = 0.0
    reading_up: float = 0.0

    @property
    def whole(self) -> float:
        """All of it."""
        return self.alone + self.drafts + self.reading_up


class Controller:
    """The costs of both models, and the estimates of what drafts are worth.

    Everything it decides is a function of what it was told before; it holds no clock.

    Args:
        target: the cost of the target's passes.
        draft: that of the draft model's; None without one.
    """

    def __init__(self, target: Cost, draft: Cost | None) -> None:
        self.target = target
        self.draft = draft
        self._calibrations: dict[tuple[str, bool], Calibration] = {}
        self._outlooks: WeakKeyDictionary[Sequence, Outlook] = WeakKeyDictionary()

    @property
    def learned(self) -> dict[tuple[str, bool], list[float]]:
        """By source, and whether texts are sampled: how often drafts stay, by how sure the source is, least first."""
        return {key: calibration.chances for key, calibration in self._calibrations.items()}

    def prices(self, sequences: Many[Sequence], rows: Many[int], kv_len: tuple[int, int], waiting: int = 0) -> Prices:
        """What passes cost in this round, and what a second of it is worth.

        That is what decoding alone would make of it: prompts that are read in this round are no reason to spend more.

        Args:
            sequences: those that decode in this round.
            rows: of the target's pass without drafts, text by text of these.
            kv_len: how many tokens a row walks over, in the caches of target and draft.
            waiting: how many texts have not begun to be written; a second is worth as much to each of them.
        """
        plain = self.target.together(rows, kv_len[0])
        rate = (sum(self._outlook(sequence).speedup for sequence in sequences) + waiting) / plain
        draft = self.draft
        return Prices(
            target=partial(self.target.together, kv_len=kv_len[0]),
            draft=(lambda count: draft.seconds(count, kv_len[1])) if draft else (lambda _count: 0.0),
            rate=rate,
            waiting=waiting > 0,
        )

    def hope(self, sequence: Sequence, pending: int = 0) -> float:
        """The chance of a draft of the model of which nothing is known yet, with so much to read before it."""
        outlook = self._outlook(sequence)
        return outlook.hope if pending <= _ARREARS or outlook.reading else outlook.steady_hope

    def chance(self, sequence: Sequence, source: str, confidence: float) -> float:
        """The chance of a draft whose source is this sure of it."""
        pooled = self._calibration(sequence, source).chance(confidence)
        return self._outlook(sequence).chance(source, pooled)

    def room(self, sequence: Sequence, room: int) -> int:
        """How many of `room` drafts the model may add: few on a text that has not shown yet that they stay."""
        stayed = sequence.account.drafters.get("model", Tally()).accepted
        return min(room, _FIRST_DRAFTS + stayed)

    def arrears(self, sequence: Sequence, pending: int, prices: Prices) -> tuple[int, float]:
        """What the model has to read before it drafts: rows of its next pass, and seconds beside it.

        A long arrear is read once, for all rounds to come; each of those that are likely is charged its share. Where
        others are about to join, what pays now may not pay among them: then this round is charged all of it.
        """
        if pending <= _ARREARS or self._outlook(sequence).reading:
            return min(pending, _ARREARS), 0.0
        ahead = 0 if prices.waiting else min(sequence.remaining, _AHEAD + sequence.generated)
        rounds = max(1.0, ahead / _TOKENS_A_ROUND)
        cut = pending < len(sequence.tokens) - sequence.draft_cached
        due = _DUE * _AGAIN ** self._outlook(sequence).invested * (_CUT if cut else 1.0)
        return 1, due * (prices.draft(pending) - prices.draft(1)) / rounds

    def may_draft(self, sequence: Sequence, pending: int, prices: Prices) -> bool:
        """Whether the model's drafts have not cost this text more than anyone would notice.

        Reading up is no loss yet, the first time; it is one where the text has to be read up again. It stops while
        prompts are read: whoever is being answered would wait for both.
        """
        outlook = self._outlook(sequence)
        if prices.waiting and pending > _GUESSED:
            # Whether it is still worth it will be asked again.
            outlook.reading = False
            return False
        if outlook.reading:
            return True
        step = outlook.plain_seconds / max(1, sequence.generated - 1)
        return outlook.debt <= _LOSS * outlook.plain_seconds + _LOSS_STEPS * step

    def invest(self, sequence: Sequence, pending: int, prices: Prices) -> float:
        """Put down that the model reads this much of a text before it drafts; the seconds that are no round's loss."""
        outlook = self._outlook(sequence)
        invests = pending > _GUESSED
        if not outlook.reading:
            outlook.invested += invests
        outlook.reading = invests
        return prices.draft(pending) - prices.draft(1) if invests and outlook.invested == 1 else 0.0

    def learn(self, sequence: Sequence, lessons: Many[Lesson], confidence: float) -> None:
        """Learn from the drafts of a round that were reached, and from how sure the target is behind them."""
        outlook = self._outlook(sequence)
        by_target = self._calibration(sequence, "target")
        for source, sure, label, target_sure in lessons:
            calibration = self._calibration(sequence, source)
            outlook.learn(source, calibration.chance(sure), label)
            calibration.learn(sure, label)
            if target_sure is None:
                continue
            pooled = by_target.chance(target_sure)
            outlook.expect(pooled)
            if source == "model":
                outlook.learn("target", pooled, label)
                by_target.learn(target_sure, label)
        outlook.expect(by_target.chance(confidence))

    def count_round(self, sequence: Sequence, tokens: int, burden: Burden) -> None:
        """Keep the books of a round: what it wrote of this text, and what plain decoding would have written.

        Args:
            sequence: one that decoded.
            tokens: how many it was given.
            burden: what it added to the round.
        """
        seconds = burden.alone + burden.drafts
        self._outlook(sequence).count_round(tokens, seconds / burden.alone, seconds, burden.alone * tokens)

    def _outlook(self, sequence: Sequence) -> Outlook:
        if sequence not in self._outlooks:
            self._outlooks[sequence] = Outlook(_HOPE)
        return self._outlooks[sequence]

    def _calibration(self, sequence: Sequence, source: str) -> Calibration:
        key = (source, not is_greedy(sequence.sampling))
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(_PRIORS.get(source, _GUESS))
        return self._calibrations[key]
