"""One text being written: what was asked, its tokens, and how much of it each model's cache holds."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Verification = Literal["token", "block", "coupled"]
DrafterName = Literal["model", "lookup", "prediction", "grammar"]


@dataclass(frozen=True)
class SamplingParams:
    """How a row of logits becomes a distribution, and which noise is drawn from it.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing; `seed` None is a random one. The
    penalties and biases are those of shaping.py; their defaults change nothing.
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

    @property
    def shapes_logits(self) -> bool:
        """Whether any penalty or bias is set."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class SpeculationParams:
    """How a sequence's tokens are guessed and checked.

    Args:
        gamma: the most drafts a round.
        verification: the rule of rejection.py.
        drafter: the only one to ask; None asks each in turn.
        adaptive: whether the controller decides how many drafts a round has; otherwise `gamma`, as far as there are.
    """

    gamma: int = 0
    verification: Verification = "block"
    drafter: DrafterName | None = None
    adaptive: bool = False


class Constraint(Protocol):
    """A grammar that the answer must follow."""

    @property
    def mask_seconds(self) -> float:
        """What `allowed` takes at present."""

    def allowed(self, written: Tokens[int]) -> NDArray[np.bool_] | None:
        """The tokens that may stand behind this beginning of the answer, shape (vocabulary,); None is all.

        Raises:
            ConstraintError: the grammar has become too costly to follow.
            MaskDeferred: the round has no time left for it.
        """

    def complete(self, written: Tokens[int]) -> bool:
        """Whether the answer can only end here."""

    def forced(self, written: Tokens[int], limit: int) -> list[int]:
        """At most `limit` tokens that the grammar's only next characters are likely to be written with.

        Raises:
            ConstraintError: the grammar has become too costly to follow.
        """


class TokenScore(NamedTuple):
    """A token's log-probability by the target alone, and the most probable tokens of its place with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Tally(NamedTuple):
    """How many tokens a drafter gave, and how many of them stayed."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class Account:
    """What one sequence's rounds did and took; seconds are its share of rounds it had with others.

    `plain_seconds` is what the cost model says its tokens behind the first would have taken without drafts, and
    `last_step` what one token of the last round.
    """

    rounds: int = 0
    drafters: dict[str, Tally] = field(default_factory=dict)
    gammas: Counter[int] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    plain_seconds: float = 0.0
    last_sources: list[str] = field(default_factory=list)
    last_accepted: int = 0
    last_step: float = 0.0

    def add_plain(self, tokens: int, step: float) -> None:
        """Count what the tokens of a round would have taken without drafts, each so many seconds."""
        self.last_step = step
        self.plain_seconds += tokens * step

    def add_round(self, sources: list[str], accepted: int) -> None:
        """Count one round of decoding, with the drafter of each draft; the round that ends a prefill is not one."""
        self.rounds += 1
        self.gammas[len(sources)] += 1
        self.last_sources, self.last_accepted = sources, accepted
        for place, drafter in enumerate(sources):
            self._tally(drafter, 1, int(place < accepted))

    def take_back(self, accepted: int, written: int) -> None:
        """The text ended in the last round: so many of its drafts, and of its tokens, stood behind the end."""
        self.plain_seconds -= min(self.last_accepted + 1, written) * self.last_step
        stayed = self.last_sources[: self.last_accepted]
        self.last_accepted = max(0, self.last_accepted - max(0, accepted))
        for drafter in stayed[self.last_accepted :]:
            self._tally(drafter, 0, -1)

    @classmethod
    def total(cls, accounts: Iterable[Account]) -> Account:
        """All of them as one, but for whose drafts came last."""
        total = cls()
        for account in accounts:
            total.rounds += account.rounds
            total.gammas += account.gammas
            total.prefill_seconds += account.prefill_seconds
            total.draft_seconds += account.draft_seconds
            total.target_seconds += account.target_seconds
            total.other_seconds += account.other_seconds
            total.plain_seconds += account.plain_seconds
            for drafter, tally in account.drafters.items():
                total._tally(drafter, *tally)
        return total

    def _tally(self, drafter: str, drafted: int, accepted: int) -> None:
        before = self.drafters.get(drafter, Tally())
        self.drafters[drafter] = Tally(before.drafted + drafted, before.accepted + accepted)

    @property
    def drafted(self) -> int:
        """Number of tokens that all drafters gave."""
        return sum(tally.drafted for tally in self.drafters.values())

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that stayed."""
        return sum(tally.accepted for tally in self.drafters.values())

    @property
    def decode_seconds(self) -> float:
        """Everything behind the first token."""
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the recovered or bonus token included; 0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


def common_prefix(left: list[int], right: list[int], most: int | None = None) -> int:
    """How many leading tokens two texts share, counted up to `most`."""
    shorter = min(len(left), len(right))
    most = shorter if most is None else min(most, shorter)
    if left[:most] == right[:most]:
        return most
    return next(i for i in range(most) if left[i] != right[i])


class Sequence:
    """A prompt and the tokens decided so far, in one slot of each model's cache.

    `target_cached` and `draft_cached` are how many leading tokens the caches hold. Everything else follows
    from these lengths: what must still be fed, and that a draft's cache lacks a token after full acceptance.
    The draft may have begun to read in the middle, at `draft_start`: what it holds are the tokens between the two.
    `reused` is how much of the prompt the target's cache already held, and `deferred` how many rounds in a row had no
    time for the sequence's grammar. `drafts_beside` is the most drafts of a round for whose end other requests wait.

    Args:
        max_tokens: the longest answer; 0 only reads the prompt.
        choice: the number of this answer among those to the same prompt; each has noise of its own.
        top_logprobs: how many of the most probable tokens are kept at every place; None keeps no scores at all.
        scores_prompt: also score the tokens of the prompt, but for the first.
        prediction: what the client believes the answer will be.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        speculation: SpeculationParams,
        *,
        max_tokens: int,
        choice: int = 0,
        top_logprobs: int | None = None,
        scores_prompt: bool = False,
        constraint: Constraint | None = None,
        prediction: Tokens[int] = (),
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.speculation = speculation
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.choice = choice
        self.top_logprobs = top_logprobs
        self.scores_prompt = scores_prompt
        self.constraint = constraint
        self.prediction = np.array(prediction, np.int32)
        self.prompt_scores: list[TokenScore] = []
        self.scores: list[TokenScore] = []
        self.rounds = 0
        self.deferred = 0
        self.drafts_beside = 1
        self.slot = -1
        self.target_cached = 0
        self.draft_start = 0
        self.draft_cached = 0
        self.reused = 0
        self.account = Account()

    @property
    def generated(self) -> int:
        """Number of tokens decided after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def prompt(self) -> list[int]:
        """The tokens before the answer."""
        return self.tokens[: self.prompt_length]

    @property
    def answer(self) -> list[int]:
        """The tokens decided after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """How many more tokens may be decided."""
        return self.max_tokens - self.generated

    @property
    def target_pending(self) -> int:
        """How many tokens the target has not seen; 1 while decoding, more during prefill."""
        return len(self.tokens) - self.target_cached

    @property
    def draft_held(self) -> int:
        """How many tokens the draft's cache holds."""
        return self.draft_cached - self.draft_start

    def cut_draft(self, length: int) -> None:
        """The draft's cache holds nothing behind the first `length` tokens."""
        self.draft_cached = min(self.draft_cached, length)
        if self.draft_cached <= self.draft_start:
            self.draft_start = self.draft_cached = 0

    def inherit_draft(self, other: Sequence, length: int) -> None:
        """The draft's cache holds what another text left there, of which the first `length` tokens are this one's."""
        self.draft_start, self.draft_cached = other.draft_start, other.draft_cached
        self.cut_draft(length)

    def common_prefix(self, tokens: list[int], most: int) -> int:
        """How many leading tokens this text shares with another one, counted up to `most`."""
        return common_prefix(self.tokens, tokens, most)

    def forget_all_but_tokens(self) -> None:
        """The answer is given; a slot goes on holding the sequence, for what the caches hold of its tokens."""
        self.constraint = None
        self.prediction = np.zeros(0, np.int32)
        self.prompt_scores, self.scores = [], []

    def truncate(self, generated: int, *, ended: bool) -> None:
        """Drop all but the first `generated` tokens behind the prompt; caches hold no more than what is left.

        What a draft guessed right behind the end of the text does not count as accepted. Where a token `ended` the
        text, it is dropped too, though plain decoding would have taken its time to write it.
        """
        dropped = self.generated - generated
        self.account.take_back(dropped - 1, dropped - ended)
        del self.tokens[self.prompt_length + generated :]
        del self.scores[generated:]
        self.target_cached = min(self.target_cached, len(self.tokens))
        self.cut_draft(len(self.tokens))
