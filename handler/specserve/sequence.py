"""One text being written: what was asked, its tokens, and how much of it each model's cache holds."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Verification = Literal["token", "block", "coupled"]


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
    """How a sequence's tokens are guessed and checked: the most drafts a round, and the rule of rejection.py."""

    gamma: int = 0
    verification: Verification = "block"


@dataclass
class Account:
    """What one sequence's rounds did and took; seconds are wall time, batch-mates included (then `shared`)."""

    shared: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    gammas: Counter[int] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0

    def add_round(self, gamma: int, accepted: int) -> None:
        """Count one round of decoding; the round that ends a prefill is not one."""
        self.rounds += 1
        self.drafted += gamma
        self.accepted += accepted
        self.gammas[gamma] += 1

    @property
    def decode_seconds(self) -> float:
        """Everything behind the first token."""
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the recovered or bonus token included; 0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


class Sequence:
    """A prompt and the tokens decided so far, in one slot of each model's cache.

    `target_cached` and `draft_cached` are how many leading tokens the caches hold. Everything else follows
    from these lengths: what must still be fed, and that a draft's cache lacks a token after full acceptance.
    `reused` is how much of the prompt the slot already held.
    """

    def __init__(
        self, prompt: list[int], sampling: SamplingParams, speculation: SpeculationParams, *, max_tokens: int
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.speculation = speculation
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.choice = 0
        self.rounds = 0
        self.slot = -1
        self.target_cached = 0
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
    def draft_pending(self) -> int:
        """How many tokens the draft has not seen."""
        return len(self.tokens) - self.draft_cached

    def truncate(self, generated: int) -> None:
        """Drop all but the first `generated` tokens behind the prompt; caches hold no more than what is left.

        What a draft guessed right behind the end of the text does not count as accepted.
        """
        dropped = self.generated - generated
        self.account.accepted -= max(0, dropped - 1)
        del self.tokens[self.prompt_length + generated :]
        self.target_cached = min(self.target_cached, len(self.tokens))
        self.draft_cached = min(self.draft_cached, len(self.tokens))
