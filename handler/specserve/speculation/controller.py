"""How many tokens to draft: expected accepted tokens against what their time is worth, decided anew in every round.

A draft token is accepted only if all before it are, so drafting n tokens gains sum_i prod_{j<=i} alpha_j tokens, where
alpha_j are acceptance probabilities (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with a measured verify
cost). Time is worth the tokens a second that decoding yields anyway. The largest gain over all n is taken, whatever
shape the costs have.

An example: alpha is .8 and then .7; a pass of the target takes 40 ms and 3 ms more for each further row, one of the
draft model 12 ms, and plain decoding yields one token in 40 ms, the rate. One draft brings .8 tokens and costs 15 ms,
which are worth 15 / 40 = .375: a gain of .425. Two bring .8 + .8 x .7 = 1.36 and cost 30 ms or .75: a gain of .61, so
two are drafted. For block verification, which accepts more, the expected tokens are a lower bound.

`model_steps` extends this to sequences that share passes; a first reader can skip it.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specserve.sampling.distribution import is_greedy
from specserve.sequence import Sequence
from specserve.speculation.acceptance import CALIBRATED, PRIORS, Calibration, SequenceAcceptance
from specserve.speculation.cost import Cost

# A pair of figures in brackets says how much half and twice the constant change mean and slowest: see acceptance.py.

# Acceptance probability of the draft model on a sequence that has shown nothing yet [.005, .012, by .65 and .85].
_FIRST_ACCEPTANCE = 0.75
# Tokens of catch-up that are part of an ordinary round: the bonus token, and accepted tokens of other sources
# [.012, .017].
_SHORT_CATCH_UP = 4
# A longer catch-up has to promise this many times its cost (benchmarks/RESULTS.md, decisions) [.072, .032, by 1.25 and
# 2.5], spread over min(remaining, generated + 48) tokens [.067, .040] at 3 tokens a round [.032, .032, by 2 and 4].
# What one set of costs gains by other values another loses.
_CATCH_UP_GAIN, _HORIZON, _TOKENS_PER_ROUND = 1.75, 48, 3
# What drafts may cost a sequence, net of what they brought: a share of its plain decoding time [.005, .000], and so
# many plain steps [.005, .000]. It bounds what an adversary can cost (tests/engine/test_simulation.py).
_LOSS_SHARE, _LOSS_STEPS = 0.01, 4.0
# Share of a sequence's measured speedup that the latest round does not replace [.013, .035, by .7 and .92].
_SPEEDUP_FADE = 0.85


class Observation(NamedTuple):
    """A proposed token that verification reached: its source and confidence, and whether it was accepted.

    `accepted` is 0, 1, or the probability with which the token was accepted. `target_confidence` is the target's at
    that position; None for a token that was proposed but not drafted.
    """

    source: str
    confidence: float
    accepted: float
    target_confidence: float | None


class RoundCosts(NamedTuple):
    """Seconds of passes in this round by their number of rows, and the value of its time.

    `rate` is what all sequences together would otherwise get in a second of it, in tokens; `holds_catch_up` is whether
    no long catch-up may start, since some sequence awaits its first token.
    """

    target: Callable[[int], float]
    draft: Callable[[int], float]
    rate: float
    holds_catch_up: bool = False


class Candidate(NamedTuple):
    """A sequence that the draft model may draft for.

    Args:
        prefix: the probability that all its drafts so far are accepted.
        acceptance: that of its next draft token, before it is drafted.
        pending: tokens that the draft model reads before it drafts the next one.
        remaining: how many more tokens it may have.
        catch_up: this round's share of the seconds of a long catch-up; 0 for a short one.
    """

    prefix: float
    acceptance: float
    pending: int
    remaining: int
    catch_up: float = 0.0


def best_length(tokens: abc.Sequence[float], seconds: abc.Sequence[float], rate: float) -> tuple[int, float]:
    """The number of further draft tokens with the largest gain, and that gain in tokens; 0 and 0.0 if none pays.

    Args:
        tokens: expected accepted tokens of 1, 2, ... further drafts.
        seconds: what these drafts cost together.
        rate: tokens a second that time is worth.
    """
    gains = [0.0, *(gained - rate * cost for gained, cost in zip(tokens, seconds, strict=True))]
    best = max(range(len(gains)), key=gains.__getitem__)
    return best, gains[best]


def model_steps(candidates: abc.Sequence[Candidate], rows: int, costs: RoundCosts) -> tuple[list[int], float]:
    """Which sequences the draft model should draft one more token for, and the expected gain of going on.

    Sequences share the passes of both models. So for each k the k likeliest sequences draft n = 1, 2, ... more tokens
    in lockstep: step 1 reads all their pending tokens, later steps one token each. The (k, n) with the largest gain
    decides who drafts the next token, and nothing else: the question is asked again before every step.

    Args:
        candidates: all that may go on.
        rows: of the target's pass by now.
        costs: of this round.

    Returns:
        Indices into `candidates`, and the gain in tokens; none and 0.0 where nothing pays.
    """
    # Those that begin a long catch-up come last, so that its cost does not keep the others from drafting.
    likeliest = sorted(range(len(candidates)), key=lambda i: -candidates[i].prefix * candidates[i].acceptance)
    order = sorted(likeliest, key=lambda i: candidates[i].catch_up > 0)
    depth = max((candidate.remaining for candidate in candidates), default=0)
    tokens, extra_rows, width = [0.0] * depth, [0] * depth, [0] * depth
    base, pending, catch_up = costs.target(rows), 0, 0.0
    best: tuple[list[int], float] = [], 0.0
    for count, index in enumerate(order, 1):
        prefix, acceptance, unread, remaining, catch_up_seconds = candidates[index]
        pending += unread
        catch_up += catch_up_seconds
        gained = 0.0
        for n in range(depth):
            if n < remaining:
                prefix *= acceptance
                gained += prefix
                width[n] += 1
            tokens[n] += gained
            extra_rows[n] += min(n + 1, remaining)
        drafting = accumulate(costs.draft(width[n]) if n else catch_up + costs.draft(pending) for n in range(depth))
        seconds = [steps + costs.target(rows + extra) - base for steps, extra in zip(drafting, extra_rows, strict=True)]
        _, gain = best_length(tokens, seconds, costs.rate)
        if gain > best[1]:
            best = order[:count], gain
    return best


def proposal_length(candidate: Candidate, probabilities: abc.Sequence[float], rows: int, costs: RoundCosts) -> int:
    """How many tokens of a proposal that cost nothing to draft; none where as many of the model's own gain more.

    Args:
        candidate: the sequence without the proposal; its remaining is 0 where the model may not draft.
        probabilities: acceptance probability of each proposed token.
        rows: of the target's pass by now.
        costs: of this round.
    """
    prefixes = list(accumulate(probabilities, mul, initial=candidate.prefix))[1:]
    base = costs.target(rows)
    seconds = [costs.target(rows + n) - base for n in range(1, len(prefixes) + 1)]
    length, gain = best_length(list(accumulate(prefixes)), seconds, costs.rate)
    instead = candidate._replace(remaining=min(candidate.remaining, len(prefixes)))
    return length if gain > model_steps([instead], rows, costs)[1] else 0


class _SequenceState:
    """What the controller knows of one sequence: acceptance, recent speedup, and what its drafts cost so far."""

    def __init__(self) -> None:
        self.acceptance = SequenceAcceptance(_FIRST_ACCEPTANCE)
        self._decoded = 0
        self._plain_seconds = 0.0
        self._loss_seconds = 0.0
        self._recent_tokens = 0.0
        self._recent_plain_tokens = 0.0

    @property
    def speedup(self) -> float:
        """Recent tokens in units of what plain decoding yields in the same time; at least 1, since that is free."""
        return max(1.0, self._recent_tokens / self._recent_plain_tokens) if self._recent_plain_tokens else 1.0

    @property
    def has_lost(self) -> bool:
        """Whether its drafts have cost more, net of what they brought, than drafts may."""
        plain_step = self._plain_seconds / max(1, self._decoded)
        return self._loss_seconds > _LOSS_SHARE * self._plain_seconds + _LOSS_STEPS * plain_step

    def count_round(self, tokens: int, plain_seconds: float, draft_seconds: float) -> None:
        """A round gave `tokens`; without drafts it would have taken `plain_seconds` for one."""
        self._decoded += tokens
        self._plain_seconds += tokens * plain_seconds
        self._loss_seconds += draft_seconds - (tokens - 1) * plain_seconds
        self._recent_tokens = _SPEEDUP_FADE * self._recent_tokens + tokens
        self._recent_plain_tokens = _SPEEDUP_FADE * self._recent_plain_tokens + 1 + draft_seconds / plain_seconds


class Controller:
    """The costs of both models, and what sequences have shown of their drafts; deterministic, without a clock.

    Args:
        target: the cost of the target's passes.
        draft: that of the draft model's; None without one.
    """

    def __init__(self, target: Cost, draft: Cost | None) -> None:
        self.target = target
        self.draft = draft
        self._calibrations: dict[tuple[str, bool], Calibration] = {}
        self._states: WeakKeyDictionary[Sequence, _SequenceState] = WeakKeyDictionary()

    @property
    def learned(self) -> dict[tuple[str, bool], list[float]]:
        """By source, and whether it is sampled: acceptance probability by confidence, lowest bin first."""
        return {key: calibration.probabilities for key, calibration in self._calibrations.items()}

    def costs(
        self, decoding: abc.Sequence[Sequence], target_kv_len: int, draft_kv_len: int, awaiting_first_token: int = 0
    ) -> RoundCosts:
        """What passes cost in this round, and what its time is worth.

        Args:
            decoding: the sequences that decode in this round.
            target_kv_len: tokens of the target's cache that a row attends to.
            draft_kv_len: the same of the draft model's.
            awaiting_first_token: how many sequences do; time is worth as much to each of them.
        """
        plain = self.target.seconds(max(1, len(decoding)), target_kv_len)
        draft = self.draft
        return RoundCosts(
            target=lambda rows: self.target.seconds(rows, target_kv_len),
            draft=(lambda rows: draft.seconds(rows, draft_kv_len)) if draft else (lambda _rows: 0.0),
            rate=(sum(self._state(sequence).speedup for sequence in decoding) + awaiting_first_token) / plain,
            holds_catch_up=awaiting_first_token > 0,
        )

    def acceptance(self, sequence: Sequence, source: str, confidence: float) -> float:
        """The acceptance probability of a token whose source has this confidence in it."""
        pooled = self._calibration(sequence, source).probability(confidence)
        return self._state(sequence).acceptance.probability(source, pooled)

    def next_acceptance(self, sequence: Sequence) -> float:
        """That of the draft model's next token, before it is drafted."""
        return self._state(sequence).acceptance.next_token

    def candidate(
        self, sequence: Sequence, prefix: float, pending: int, remaining: int, costs: RoundCosts
    ) -> Candidate | None:
        """A sequence in adaptive mode as the draft model may go on with it; None where it may not.

        It may not after its drafts lost too much. A long catch-up is made once for all rounds that follow: each of
        those to come is charged its share, with a margin. No long catch-up starts while a prompt is being prefilled:
        sequences that decode would wait for both.

        Args:
            sequence: in adaptive mode.
            prefix: the probability that all its drafts so far are accepted.
            pending: tokens that the draft model has to read before it drafts.
            remaining: how many more tokens it may have.
            costs: of this round.
        """
        state = self._state(sequence)
        if state.has_lost:
            return None
        acceptance = state.acceptance.next_token
        if pending <= _SHORT_CATCH_UP:
            return Candidate(prefix, acceptance, pending, remaining)
        if costs.holds_catch_up:
            return None
        rounds = max(1.0, min(sequence.remaining, _HORIZON + sequence.generated) / _TOKENS_PER_ROUND)
        catch_up = _CATCH_UP_GAIN * (costs.draft(pending) - costs.draft(1)) / rounds
        return Candidate(prefix, state.acceptance.long_run, 1, remaining, catch_up)

    def learn(self, sequence: Sequence, observations: abc.Sequence[Observation], confidence: float) -> None:
        """Learn from the tokens that verification reached, and from the target's confidence after the accepted ones."""
        own = self._state(sequence).acceptance
        by_target = self._calibration(sequence, "target")
        for source, sure, label, target_sure in observations:
            calibration = self._calibration(sequence, source)
            own.learn(source, calibration.probability(sure), label)
            calibration.learn(sure, label)
            if target_sure is None:
                continue
            pooled = by_target.probability(target_sure)
            own.expect(pooled)
            if source == "model":
                own.learn("target", pooled, label)
                by_target.learn(target_sure, label)
        # So the position of a rejection counts twice. Counted once, the slowest answer of benchmarks/simulate.py is at
        # 0.998 instead of 1.018 of plain decoding (1.5B by 0.5B, our kernels), and the mean is the same.
        own.expect(by_target.probability(confidence))

    def count_round(self, sequence: Sequence, tokens: int, plain_seconds: float, draft_seconds: float) -> None:
        """Account for a decoding round of a sequence.

        Args:
            sequence: one that decoded.
            tokens: how many it was given.
            plain_seconds: its share of the pass, had no sequence drafted.
            draft_seconds: what its drafts added in both models, a long catch-up left out.
        """
        self._state(sequence).count_round(tokens, plain_seconds, draft_seconds)

    def _state(self, sequence: Sequence) -> _SequenceState:
        if sequence not in self._states:
            self._states[sequence] = _SequenceState()
        return self._states[sequence]

    def _calibration(self, sequence: Sequence, source: str) -> Calibration:
        key = (source, not is_greedy(sequence.sampling))
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(PRIORS.get(source, CALIBRATED))
        return self._calibrations[key]
