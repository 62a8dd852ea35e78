"""A sequence: its tokens, how it is sampled and drafted for, and what its rounds have done."""

from __future__ import annotations

import secrets
from collections import Counter, abc
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Verification = Literal["token", "block", "coupled"]
DrafterName = Literal["model", "lookup", "prediction", "grammar"]
# Who wrote a token: the drafter of an accepted one; the target also where it replaced a draft.
Source = Literal[DrafterName, "target"]
SpeculationMode = Literal["off", "fixed", "auto"]
# A client, and the name of a pool of its finished answers; or the salt of its cached prefixes.
Pool = tuple[str, str]
Owner = tuple[str, str]
Group = Literal[SpeculationMode, "holdback"]

# Tokens that are compared at once.
_SLICE = 256
# The temperature below which single precision could not divide; only a tie to six digits would see the difference.
_GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How logits become a distribution; the defaults of all but `temperature` change nothing."""

    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_k: int = 0  # keep the k most probable tokens, lower ids first among equals; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most probable tokens that holds this mass
    min_p: float = 0.0  # keep tokens at least this fraction as probable as the most probable one
    seed: int | None = None  # of coupled verification's noise; None picks one at random
    # What sampling/logits.py applies.
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_tokens: tuple[int, ...] | None = None
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def shapes_logits(self) -> bool:
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    @property
    def forbids_tokens(self) -> bool:
        return self.allowed_tokens is not None or self.min_tokens > 0


@dataclass(frozen=True)
class SpeculationParams:
    """How many tokens are drafted per round, by which drafter, and how they are verified."""

    gamma: int = 0  # draft tokens per round in mode `fixed`, their maximum in mode `auto`
    verification: Verification = "block"
    drafter: DrafterName | None = None  # the only one to use; None tries each in turn
    mode: SpeculationMode = "fixed"
    pool: Pool | None = None  # of finished answers that lookups search and that this one's joins


@dataclass(frozen=True)
class RequestInfo:
    """The labels that all sequences of a request share."""

    request: str = ""  # TorchServe's request id
    family: str = ""  # the client's `prompt_family`
    group: Group = "auto"  # `holdback` is `auto` without drafts, for the control group
    randomised: bool = False  # whether `auto` or `holdback` was drawn; only such requests may be compared
    client: str = ""  # by the API key
    cache_salt: str = ""  # prefixes are reused only by the client's requests with the same one

    @property
    def owner(self) -> Owner:
        """Whose prefixes the request's sequences reuse, and who reuses theirs."""
        return self.client, self.cache_salt


class Constraint(Protocol):
    """A grammar that the completion must follow, or only the tool calls in it.

    `allowed` and `forced` raise `ConstraintError` where the grammar cannot be followed further, and `MaskDeferred`
    where the round has no time left for it.
    """

    def allowed(self, written: abc.Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens that may follow this beginning of the completion, shape (vocabulary,); None allows all."""

    def complete(self, written: abc.Sequence[int]) -> bool:
        """Whether the completion can only end here; the same in every round, whatever time it has left for masks."""

    def forced(self, written: abc.Sequence[int], max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens that are likely to spell the only characters the grammar allows next."""


class TokenScore(NamedTuple):
    """A token's log-probability by the target alone, and the most probable tokens at its position with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Timestamps:
    """In seconds; a preempted sequence is queued again."""

    arrival: float = 0.0
    queued: float = 0.0
    start: float | None = None  # in its first slot
    first_token: float | None = None
    last_token: float = 0.0


@dataclass
class SequenceStats:
    """What the rounds of a sequence did, and its share of the seconds they took; `SequenceStep.count` adds a round."""

    rounds: int = 0  # that decoded
    committed: int = 0  # tokens of these, an end token included
    gammas: Counter[int] = field(default_factory=Counter)  # rounds by number of draft tokens
    drafted_by: Counter[str] = field(default_factory=Counter)  # draft tokens by drafter
    accepted_by: Counter[str] = field(default_factory=Counter)
    alternatives: int = 0  # that the target read
    adopted: int = 0  # of these, that were recovered and gave one more token
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    plain_seconds: float = 0.0  # what `committed` would have taken without drafts, by the cost table

    @classmethod
    def total(cls, parts: Iterable[SequenceStats]) -> SequenceStats:
        total = cls()
        for stats in parts:
            for counter in fields(cls):
                setattr(total, counter.name, getattr(total, counter.name) + getattr(stats, counter.name))
        return total

    @property
    def drafted(self) -> int:
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were accepted and emitted."""
        return self.accepted_by.total()

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the recovered or bonus token included; 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0


def common_prefix(left: list[int], right: list[int], max_length: int | None = None) -> int:
    """The number of leading tokens that are equal in both lists, counted up to `max_length`."""
    end = min(len(left), len(right)) if max_length is None else max(0, min(len(left), len(right), max_length))
    # Comparing slices takes a twentieth of the time of a loop.
    same = 0
    while same < end and left[same : same + _SLICE] == right[same : same + _SLICE]:
        same += _SLICE
    return next((index for index in range(same, end) if left[index] != right[index]), end)


@dataclass(eq=False, repr=False)
class Sequence:
    """A prompt, the tokens committed after it, and how they are sampled and drafted for.

    What the models' KV caches hold of its tokens is known there (kv_cache.py), by `slot`.
    """

    prompt: list[int]
    sampling: SamplingParams
    speculation: SpeculationParams
    _: KW_ONLY
    max_tokens: int  # after the prompt; 0 only prefills it
    choice: int = 0  # the index of this completion of the prompt; each has noise of its own
    top_logprobs: int | None = None  # tokens whose scores are kept at every position; None keeps none
    scores_prompt: bool = False  # whether the prompt's tokens after the first are scored too
    constraint: Constraint | None = None
    prediction: abc.Sequence[int] = ()  # the tokens of the client's predicted output
    keeps_sources: bool = False  # whether `sources` says who wrote each token after the prompt
    reuses_prefix: bool = True  # whether what the caches hold of the prompt's beginning is used
    info: RequestInfo = RequestInfo()
    index: int = 0  # in its request

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.prompt_length = len(self.prompt)
        # Of its own even where a seed is shared (sampling/noise.py).
        self.secret = secrets.randbits(64)
        self.seed = self.secret if self.sampling.seed is None else self.sampling.seed
        self.prompt_scores: list[TokenScore] = []
        self.scores: list[TokenScore] = []
        self.sources: list[Source] = []
        self.slot = -1  # while it waits
        self.cached_tokens = 0  # of the prompt, that needed no pass when it first got a slot
        self.round_number = 0  # rounds that have committed tokens; keys the noise of the next one
        self.deferrals = 0  # rounds since then that had no time for its grammar mask
        self.preemptions = 0  # how often it lost its slot
        self.turn_start = 0  # tokens that it had generated when it got the present one
        self.ended_by_eos = False  # by an end token, which is not one of its tokens
        self.timestamps = Timestamps()
        self.stats = SequenceStats()

    @property
    def generated(self) -> int:
        """Number of tokens committed after the prompt."""
        return len(self.tokens) - self.prompt_length

    @cached_property
    def prompt_set(self) -> NDArray[np.intp]:
        """The prompt's tokens, each once, ascending."""
        return np.unique(np.array(self.prompt, np.intp))

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.generated

    def release(self) -> None:
        """Drop what only the rounds need, such as a grammar's state of some megabytes; the tokens stay."""
        self.constraint = None
        self.prediction = ()
