"""How far to guess: the tokens that more drafts are likely to bring, against what their time is worth.

A draft stays only if all before it stay, so a text of drafts gains reach x chance a draft: the probability that it is
reached, times that it then stays (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, but with a verify cost that
is a measured staircase, not a constant, and with chances that differ from place to place). Time is worth the tokens a
second that decoding gets anyway; what is chosen is the largest gain beyond that, over all stairs, not the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# What a draft of the model will say of itself is mostly one of two things: it is sure, or it is not. With these chances
# of staying, in the proportion that makes a text's hope (benchmarks/simulate.py).
_SURE, _UNSURE = 0.95, 0.3


class Prospect(NamedTuple):
    """One sequence in the middle of a round's drafting.

    Args:
        place: which of the texts of the target's pass it is.
        reach: the probability that all its drafts so far stay.
        hope: the probability that a draft of the model will stay where it is reached, before that draft is known.
        pending: how many tokens the model has to read before it can draft the next one.
        room: how many more drafts of the model it may have.
        arrears: seconds of reading beside that, as far as this round has to bear them.
    """

    place: int
    reach: float
    hope: float
    pending: int
    room: int
    arrears: float = 0.0


class Prices(NamedTuple):
    """What passes take, in seconds by their rows, and what a second is worth, in tokens.

    The target's depends on how the rows are spread over the texts; the draft model's only on their number. While
    others are `waiting` to be written, both will soon be different.
    """

    target: Callable[[Sequence[int]], float]
    draft: Callable[[int], float]
    rate: float
    waiting: bool = False


class Steps(NamedTuple):
    """Whose next token the model should draft, and the tokens gained by that beyond the worth of its time."""

    chosen: tuple[int, ...]
    gain: float


def model_steps(prospects: Sequence[Prospect], rows: Sequence[int], prices: Prices) -> Steps:
    """Which sequences the draft model should take one token further, in view of all the steps that may follow.

    Looks at every number of further steps for every number of sequences, the likeliest to be reached first, and for
    one alone at stopping as soon as the model is unsure. Nothing is chosen if no such plan is worth its time.

    Args:
        prospects: the sequences that may go on.
        rows: how many rows of each text the target's pass has by now.
        prices: of both models' passes.
    """
    able = [index for index, prospect in enumerate(prospects) if prospect.room > 0]
    order = sorted(able, key=lambda i: -prospects[i].reach * prospects[i].hope)
    deepest = max((prospect.room for prospect in prospects), default=0)
    tokens = [0.0] * (deepest + 1)
    shapes = [list(rows) for _ in range(deepest + 1)]
    width = [0] * (deepest + 1)
    pending, arrears = 0, 0.0
    best = Steps((), 0.0)
    for count, index in enumerate(order, 1):
        place, stays, hope, lag, room, late = prospects[index]
        pending += lag
        arrears += late
        gained = 0.0
        for depth in range(1, deepest + 1):
            if depth <= room:
                stays *= hope
                gained += stays
                width[depth] += 1
            tokens[depth] += gained
            shapes[depth][place] += min(depth, room)
        verifying = [prices.target(shape) for shape in shapes]
        drafting = arrears + prices.draft(pending)
        for depth in range(1, deepest + 1):
            if depth > 1:
                drafting += prices.draft(width[depth])
            gain = tokens[depth] - prices.rate * (drafting + verifying[depth] - verifying[0])
            if gain > best.gain:
                best = Steps(tuple(order[:count]), gain)
        if count == 1:
            gain = _stopping(prospects[index], verifying, prices)
            if gain > best.gain:
                best = Steps((index,), gain)
    return best


def _stopping(prospect: Prospect, verifying: Sequence[float], prices: Prices) -> float:
    """The tokens gained if one text goes on while the model is sure of its drafts, and as long as that pays.

    A draft is paid for before it shows whether it is sure, but not the target's row for it: an unsure one is kept if it
    is worth that row, and is the last. From the last step backwards (an optimal stopping problem).

    Args:
        prospect: the text.
        verifying: seconds of the target's pass, by how many more drafts this text has in it.
        prices: what drafting costs, and what a second is worth.
    """
    sure, unsure = max(_SURE, prospect.hope), min(_UNSURE, prospect.hope)
    share = (prospect.hope - unsure) / (sure - unsure)
    step = prices.draft(1)
    value = 0.0
    for depth in reversed(range(prospect.room)):
        reach = prospect.reach * sure**depth
        row = prices.rate * (verifying[depth + 1] - verifying[depth])
        drafting = prices.rate * (step if depth else prospect.arrears + prices.draft(prospect.pending))
        going_on = max(0.0, reach * sure - row + value)
        value = max(0.0, share * going_on + (1 - share) * max(0.0, reach * unsure - row) - drafting)
    return value


def guess_length(
    prospect: Prospect, chances: Sequence[float], rows: Sequence[int], prices: Prices, *, room: int, model: bool
) -> int:
    """How many tokens of a guess that cost nothing should be drafted, before the model drafts what may follow.

    Args:
        prospect: the sequence as it is without the guess.
        chances: of each guessed token, the probability that it stays where it is reached.
        rows: how many rows of each text the target's pass has by now.
        prices: of both models' passes.
        room: how many drafts of any source the round may still have.
        model: whether the model may draft behind the guess, or in its place.
    """
    before = prices.target(rows)
    best, most = 0, model_steps([prospect], rows, prices).gain if model else 0.0
    reach, gained = prospect.reach, 0.0
    for count, chance in enumerate(chances, 1):
        reach *= chance
        gained += reach
        longer = _with_more(rows, prospect.place, count)
        gain = gained - prices.rate * (prices.target(longer) - before)
        if model:
            left = max(0, min(prospect.room, room - count))
            behind = prospect._replace(reach=reach, pending=prospect.pending + count, room=left)
            gain += model_steps([behind], longer, prices).gain
        if gain > most:
            best, most = count, gain
    return best


def worth_keeping(prospect: Prospect, chance: float, rows: Sequence[int], prices: Prices) -> bool:
    """Whether a draft whose step is paid for should be drawn at all, now that its chance is known.

    Asked before the token is drawn: a token that was drawn stays in the round.
    """
    reach = prospect.reach * chance
    longer = _with_more(rows, prospect.place, 1)
    gain = reach - prices.rate * (prices.target(longer) - prices.target(rows))
    if gain > 0 or prospect.room <= 1:
        return gain > 0
    behind = Prospect(prospect.place, reach, prospect.hope, pending=1, room=prospect.room - 1)
    return gain + model_steps([behind], longer, prices).gain > 0


def _with_more(rows: Sequence[int], place: int, count: int) -> list[int]:
    longer = list(rows)
    longer[place] += count
    return longer
