"""The object `speculation` of responses, made from what was counted."""

from __future__ import annotations

from specserve.api import response_schema as schema
from specserve.sequence import SequenceStats, SpeculationParams


def speculation_of(stats: SequenceStats, params: SpeculationParams) -> schema.Speculation:
    """Tell how a request was drafted and verified."""
    return schema.Speculation(
        mode=params.mode,
        verification=params.verification,
        rounds=stats.rounds,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        mean_acceptance_length=round(stats.mean_acceptance_length, 3),
        gamma_histogram={str(gamma): count for gamma, count in sorted(stats.gammas.items())},
        drafters={
            name: schema.DrafterCounts(drafted=drafted, accepted=stats.accepted_by[name])
            for name, drafted in stats.drafted_by.items()
        },
        alternatives=schema.AlternativeCounts(read=stats.alternatives, adopted=stats.adopted),
        seconds=schema.Seconds(
            prefill=round(stats.prefill_seconds, 6),
            draft=round(stats.draft_seconds, 6),
            target=round(stats.target_seconds, 6),
            other=round(stats.other_seconds, 6),
            plain_estimate=round(stats.plain_seconds, 6),
        ),
        estimated_speedup=round(stats.plain_seconds / stats.decode_seconds, 3) if stats.decode_seconds else None,
    )
