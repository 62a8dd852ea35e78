"""Steps that are over, for tests of what reads them."""

from __future__ import annotations

from collections import abc

from specserve.sequence import DrafterName, RequestInfo, SamplingParams, Sequence, SpeculationParams
from specserve.speculation.step import Draft, SequenceStep, TimeShare


def finished_step(
    info: RequestInfo,
    drafters: abc.Sequence[DrafterName] = (),
    accepted: int = 0,
    tokens: abc.Sequence[int] = (),
    *,
    position: int = 1,
    seconds: tuple[float, float, float] = (0.1, 0.2, 0.01),
) -> SequenceStep:
    """A step that has committed `tokens`, after `position` others; with 0 it is the end of a prefill.

    `seconds` are those of drafting, of the target's pass, and of all else.
    """
    sequence = Sequence([1] * 50, SamplingParams(), SpeculationParams(), max_tokens=99, info=info)
    sequence.tokens += [7] * position
    step = SequenceStep(sequence, num_computed_tokens=49 + position, rows=1)
    step.drafts = [Draft(7, None, drafter, 0.5) for drafter in drafters]
    step.n_accepted, step.n_committed = accepted, len(tokens)
    step.seconds = TimeShare(*seconds)
    sequence.tokens += tokens
    return step
