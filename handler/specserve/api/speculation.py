"""The object `speculation`: of a request, which says how drafts are made, and of a response, which counts them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from specserve.api.body import Body, Text
from specserve.config import HandlerConfig
from specserve.errors import RequestError
from specserve.sequence import Group, SequenceStats, SpeculationParams, Verification


class SpeculationOptions(Body):
    """Speculation for this request: the server's default, off, or a fixed number of draft tokens per round."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model", "lookup", "prediction", "grammar"] = "auto"
    verification: Verification | None = None
    sources: bool = False  # whether the response says who wrote what
    pool: Annotated[Text, Field(max_length=200)] | None = None  # of answers that lookups search; '' is none

    def params(
        self, config: HandlerConfig, group: Group, client: str, *, greedy: bool, seeded: bool
    ) -> SpeculationParams:
        """Return how drafts are made and verified, within the operator's limits; `group` has the mode.

        Raises:
            RequestError: 400; it is beyond the limits.
        """
        limits = config.speculation
        if config.draft is None and self.drafter == "model":
            raise RequestError.invalid("speculation.drafter", "This server has no draft model.")
        mode = "off" if group == "holdback" else group
        fixed = limits.gamma if self.gamma is None else self.gamma
        gamma = {"auto": limits.max_gamma, "fixed": fixed, "off": 0}[mode]
        if gamma > limits.max_gamma:
            sentence = f"'speculation.gamma' may be at most {limits.max_gamma} on this server."
            raise RequestError.invalid("speculation.gamma", sentence)
        # With a seed the text has to repeat; the default is else the rule that accepts most. Greedy, all rules are the
        # same, and `token` is the name that describes `accept_equal` best.
        default: Verification = "token" if greedy else "coupled" if seeded else "block"
        drafter = None if self.drafter == "auto" else self.drafter
        pool = None if self.pool == "" else (client, self.pool or "default")
        return SpeculationParams(gamma, self.verification or default, drafter, mode, pool)


def speculation_of(stats: SequenceStats, params: SpeculationParams) -> dict[str, Any]:
    """Return the object of a response."""
    seconds = {
        "prefill": stats.prefill_seconds,
        "draft": stats.draft_seconds,
        "target": stats.target_seconds,
        "other": stats.other_seconds,
        "plain_estimate": stats.plain_seconds,
    }
    return {
        "mode": params.mode,
        "verification": params.verification,
        "rounds": stats.rounds,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "gamma_histogram": {str(gamma): count for gamma, count in sorted(stats.gammas.items())},
        "drafters": {
            name: {"drafted": drafted, "accepted": stats.accepted_by[name]}
            for name, drafted in stats.drafted_by.items()
        },
        "alternatives": {"read": stats.alternatives, "adopted": stats.adopted},
        "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
        "estimated_speedup": round(stats.plain_seconds / stats.decode_seconds, 3) if stats.decode_seconds else None,
    }
