"""Steps that are over, for tests of what reads them."""

from collections import abc

from specserve.observability.records import EndRecord
from specserve.sequence import DrafterName, RequestInfo, SamplingParams, Sequence, SpeculationParams
from specserve.speculation.step import Draft, SequenceStep, TimeShare

INFO = RequestInfo("r", "code")


def an_end(info: RequestInfo = INFO, tpot: float | None = 0.1, choice: int = 0) -> EndRecord:
    return EndRecord(info, choice, "stop", 40, 30, 20, 2, waited=0.5, ttft=1.5, tpot=tpot)


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
