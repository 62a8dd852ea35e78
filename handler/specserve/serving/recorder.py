"""Adds what rounds did to the statistics of sequences, and tells the observers: metrics and traces."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable

from specserve.observability.records import Observer, RoundRecord
from specserve.serving.generation import Generation
from specserve.speculation.round import Outcome, Report


class Recorder:
    """Records rounds and ends.

    Args:
        clock: seconds.
        observers: told of every round and of every end.
    """

    def __init__(self, clock: Callable[[], float], observers: abc.Sequence[Observer]) -> None:
        self._clock = clock
        self._observers = observers

    def record_round(self, running: list[Generation], report: Report, started: float) -> None:
        """Record a round, after its tokens have been read.

        Args:
            running: the sequences that were running; those that the round did nothing for are not recorded.
            report: of the round.
            started: when it began.
        """
        now = self._clock()
        other_seconds = now - started - report.draft_seconds - report.target_seconds
        for generation in running:
            outcome = report.outcomes.get(generation)
            if outcome is None:
                continue
            record = _round_record(generation, outcome, report, other_seconds, live=len(running))
            _count(generation, outcome, record, now)
            for observer in self._observers:
                observer.round(record)

    def record_ends(self, ended: Iterable[Generation]) -> None:
        """Record sequences that have finished, failed or left."""
        for generation in ended:
            record = generation.end_record(self._clock())
            for observer in self._observers:
                observer.end(record)


def _round_record(
    generation: Generation, outcome: Outcome, report: Report, other_seconds: float, *, live: int
) -> RoundRecord:
    tokens = generation.answer[outcome.generated_before :]
    return RoundRecord(
        generation.info,
        generation.index,
        position=outcome.generated_before,
        kv_len=outcome.cached_before,
        drafts=outcome.drafted_by,
        # Of drafts after the end of the text none counts as accepted.
        accepted=min(outcome.n_accepted, len(tokens)),
        tokens=tokens,
        draft_seconds=outcome.charge.draft_share * report.draft_seconds,
        target_seconds=outcome.charge.target_share * report.target_seconds,
        other_seconds=outcome.charge.target_share * other_seconds,
        live=live,
        is_decode_round=outcome.is_decode_round,
        alternatives=outcome.n_alternatives,
        adopted=outcome.adopted,
    )


def _count(generation: Generation, outcome: Outcome, record: RoundRecord, now: float) -> None:
    times, stats = generation.timestamps, generation.stats
    if record.tokens:
        times.last_token = now
        times.first_token = now if times.first_token is None else times.first_token
    in_prefill = outcome.generated_before == 0
    stats.add_seconds(record.draft_seconds, record.target_seconds, record.other_seconds, prefill=in_prefill)
    if outcome.is_decode_round:
        # Plain decoding takes a step for the EOS token as well.
        steps = len(record.tokens) + generation.ended_by_eos
        stats.add_round(outcome.drafted_by, record.accepted, steps, steps * outcome.charge.plain_seconds)
        stats.alternatives += outcome.n_alternatives
        stats.adopted += outcome.adopted
