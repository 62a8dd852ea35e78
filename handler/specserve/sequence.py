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


@dataclass(frozen=True)
class SamplingParams:
    """How logits become a distribution, and the seed of the noise by which coupled verification samples from it.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing; `seed` None picks one at random. The
    defaults of the penalties, biases and restrictions (sampling/logits.py) change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()

    @property
    def shapes_logits(self) -> bool:
        """Whether any penalty or bias is set."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    @property
    def forbids_tokens(self) -> bool:
        """Whether some tokens may not be generated, everywhere or at some positions."""
        return self.allowed_tokens is not None or bool(self.bad_words) or self.min_tokens > 0


@dataclass(frozen=True)
class SpeculationParams:
    """How many tokens are drafted per round, by which drafter, and how they are verified.

    Args:
        gamma: draft tokens per round in mode `fixed`, their maximum in mode `auto`.
        verification: the rule of rejection.py.
        drafter: the only drafter to use; None tries each in turn.
        mode: no drafts, `gamma` of them, or as many as the controller decides.
        pool: of finished answers that lookups search and that this one's joins; None is none.
    """

    gamma: int = 0
    verification: Verification = "block"
    drafter: DrafterName | None = None
    mode: SpeculationMode = "fixed"
    pool: Pool | None = None


@dataclass(frozen=True)
class RequestInfo:
    """The labels that all sequences of a request share.

    Args:
        request: TorchServe's request id.
        family: the client's `prompt_family`; empty without one.
        group: the speculation mode; `holdback` is `auto` without drafts, for the control group.
        randomised: whether the group was drawn between `auto` and `holdback`; only such requests may be compared.
        client: whose it is, by the API key.
        cache_salt: prefixes are reused only by the client's requests with the same one.
    """

    request: str = ""
    family: str = ""
    group: Group = "auto"
    randomised: bool = False
    client: str = ""
    cache_salt: str = ""

    @property
    def owner(self) -> Owner:
        """Whose prefixes the request's sequences reuse, and who reuses theirs."""
        return self.client, self.cache_salt


class Constraint(Protocol):
    """A grammar that the completion must follow, or only the tool calls in it."""

    @property
    def allows_text(self) -> bool:
        """Whether the completion is free text until a call begins."""

    def allowed(self, written: abc.Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens that may follow this beginning of the completion, shape (vocabulary,); None allows all.

        Raises:
            ConstraintError: the grammar cannot be followed further.
            MaskDeferred: the round has no time left for it.
        """

    def complete(self, written: abc.Sequence[int]) -> bool:
        """Whether the completion can only end here; the same in every round, whatever time it has left for masks."""

    def forced(self, written: abc.Sequence[int], max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens that are likely to spell the only characters the grammar allows next.

        Raises:
            ConstraintError: the grammar cannot be followed further.
            MaskDeferred: the round has no time left for it.
        """


class TokenScore(NamedTuple):
    """A token's log-probability by the target alone, and the most probable tokens at its position with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Timestamps:
    """When a sequence arrived, was queued last, got its first slot, its first and its last token; in seconds."""

    arrival: float = 0.0
    queued: float = 0.0
    start: float | None = None
    first_token: float | None = None
    last_token: float = 0.0


@dataclass
class SequenceStats:
    """What the rounds of a sequence did, and its share of the seconds they took; `Step.count` adds a round.

    `rounds` counts decode rounds, `gammas` those by their number of draft tokens, `drafted_by` and `accepted_by` draft
    tokens by drafter, `committed` all their tokens, an end token included. `alternatives` counts those that the target
    read, `adopted` those that were recovered and gave one more token. `plain_seconds` is what the tokens after the
    first would have taken without drafts, by the cost model.
    """

    rounds: int = 0
    committed: int = 0
    gammas: Counter[int] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    alternatives: int = 0
    adopted: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    plain_seconds: float = 0.0

    @classmethod
    def total(cls, parts: Iterable[SequenceStats]) -> SequenceStats:
        """The sum over several sequences."""
        total = cls()
        for stats in parts:
            for counter in fields(cls):
                setattr(total, counter.name, getattr(total, counter.name) + getattr(stats, counter.name))
        return total

    @property
    def drafted(self) -> int:
        """Number of draft tokens."""
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were accepted and emitted."""
        return self.accepted_by.total()

    @property
    def decode_seconds(self) -> float:
        """The time after the first token."""
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the recovered or bonus token included; 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0


def common_prefix(left: list[int], right: list[int], max_length: int | None = None) -> int:
    """The number of leading tokens that are equal in both lists, counted up to `max_length`."""
    end = min(len(left), len(right)) if max_length is None else min(len(left), len(right), max_length)
    # Comparing slices takes a twentieth of the time of a loop: ever longer ones, then halves of the first that differ.
    same, length, differs = 0, 64, False
    while length and same < end:
        part = slice(same, min(same + length, end))
        if left[part] == right[part]:
            same = part.stop
        else:
            differs = True
        length = length // 2 if differs else length * 2
    return same


@dataclass(eq=False, repr=False)
class Sequence:
    """A prompt, the tokens committed after it, and how they are sampled and drafted for.

    `tokens` are all of them; what the models' KV caches hold of them is known there (kv_cache.py), by `slot`, which is
    -1 while the sequence waits. `cached_tokens` is how many tokens of the prompt needed no pass when it first got a
    slot. `round_number` counts the rounds that have committed tokens and keys the noise of the next one; `deferrals`
    counts the rounds since then that had no time for the sequence's grammar mask; `preemptions` counts how often it
    lost its slot, and `turn_start` is how many tokens it had generated when it got the present one.

    Args:
        prompt: its tokens.
        sampling: how tokens are sampled.
        speculation: how they are drafted and verified.
        max_tokens: the most tokens after the prompt; 0 only prefills it.
        choice: the index of this completion of the prompt; each has noise of its own.
        top_logprobs: how many of the most probable tokens are kept at every position; None keeps no scores.
        scores_prompt: whether the prompt's tokens after the first are scored too.
        constraint: the grammar of the tokens after the prompt.
        prediction: the tokens of the client's predicted output.
        keeps_sources: whether `sources` says who wrote each token after the prompt.
        reuses_prefix: whether what the caches hold of the prompt's beginning is used.
        info: the request's labels.
        index: of this sequence in its request.
    """

    prompt: list[int]
    sampling: SamplingParams
    speculation: SpeculationParams
    _: KW_ONLY
    max_tokens: int
    choice: int = 0
    top_logprobs: int | None = None
    scores_prompt: bool = False
    constraint: Constraint | None = None
    prediction: abc.Sequence[int] = ()
    keeps_sources: bool = False
    reuses_prefix: bool = True
    info: RequestInfo = RequestInfo()
    index: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.prompt_length = len(self.prompt)
        # Of its own even where a seed is shared (sampling/noise.py).
        self.secret = secrets.randbits(64)
        self.seed = self.secret if self.sampling.seed is None else self.sampling.seed
        self.prompt_scores: list[TokenScore] = []
        self.scores: list[TokenScore] = []
        self.sources: list[Source] = []
        self.slot = -1
        self.cached_tokens = 0
        self.round_number = self.deferrals = self.preemptions = self.turn_start = 0
        # Whether an end token ended it, which is not one of its tokens.
        self.ended_by_eos = False
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
        """The tokens committed after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.max_tokens - self.generated

    def release(self) -> None:
        """Drop what only the rounds need, such as a grammar's state of some megabytes; the tokens stay."""
        self.constraint = None
        self.prediction = ()
