"""A round's drafts: token by token from the cheapest source that has something to propose, as far as it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from specserve.errors import ConstraintError, DraftError, MaskDeferred
from specserve.sampling.distribution import FloatArray, argmax, confidence, is_greedy, one_hot, to_distribution
from specserve.sampling.logits import process_logits
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.controller import (
    Candidate,
    Controller,
    RoundCosts,
    model_steps,
    proposal_length,
)
from specserve.speculation.draft_model import DraftModel, DraftText
from specserve.speculation.lookup import FreeTokens
from specserve.speculation.rejection import RULES

logger = logging.getLogger(__name__)

# Assumed probability that a forced token is right: the same characters could be split into other tokens. The controller
# learns from then on what verification shows.
_FORCED_CONFIDENCE = 0.9


class Proposer(Protocol):
    """A source of tokens that are a function of the sequence, drafts included, and of nothing that was drawn."""

    name: ClassVar[DrafterName]

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """At most `limit` tokens that may follow the sequence and these drafts of it; none is an answer."""


class GrammarProposer:
    """Proposes the characters that the request's grammar leaves no choice about."""

    name: ClassVar[DrafterName] = "grammar"

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The forced tokens, as the tokenizer would write them; see `Proposer.propose`."""
        if sequence.constraint is None:
            return FreeTokens([], [])
        try:
            tokens = sequence.constraint.forced([*sequence.answer, *drafts], limit)
        except (ConstraintError, MaskDeferred):
            # The target's logits of this position meet the same grammar: verification says what is to be done.
            return FreeTokens([], [])
        return FreeTokens(tokens, [_FORCED_CONFIDENCE] * len(tokens))


class Draft(NamedTuple):
    """A draft token, the distribution q it was sampled from, its source, and the source's confidence in it."""

    token: int
    q: FloatArray
    source: DrafterName
    confidence: float


class Undrafted(NamedTuple):
    """The first token of a proposal that was not worth drafting: verification shows all the same if it was right."""

    token: int
    source: str
    confidence: float


@dataclass
class Proposal:
    """The drafts of one sequence in one round.

    Args:
        sequence: which may have up to `gamma` drafts.
        gamma: tokens.
        noise: of this round.
        seconds: the sequence's share of the draft model's passes, by the cost model.
        prefill_seconds: the part of them that read the prompt, which all rounds that follow profit from.
        prefix: the estimated probability that all drafts so far are accepted.
        ended: whether the draft model has nothing more to add.
        deferred: whether it comes from an earlier round that could not verify it to its end; nothing is added.
    """

    sequence: Sequence
    gamma: int
    noise: Noise
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    drafts: list[Draft] = field(default_factory=list)
    undrafted: list[Undrafted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefix: float = 1.0
    ended: bool = False
    deferred: bool = False

    def add(self, draft: Draft, acceptance: float) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)
        self.tokens.append(draft.token)
        self.prefix *= acceptance

    @property
    def remaining(self) -> int:
        """How many more tokens may be drafted."""
        return self.gamma - len(self.tokens)

    @property
    def q(self) -> list[FloatArray]:
        """The distributions that the drafts were sampled from, in order."""
        return [draft.q for draft in self.drafts]

    @property
    def sources(self) -> list[DrafterName]:
        """The sources of the drafts, in order."""
        return [draft.source for draft in self.drafts]


class Drafters:
    """All sources of drafts, and the controller that weighs them.

    After every draft the proposers are asked first, since they cost nothing; the model drafts where they have nothing
    to propose, or nothing as good. A drawn token is never taken back, and whether a further one is drawn is decided
    before it is: the length of a proposal is a stopping time, which every rule of rejection.py allows.

    Args:
        controller: decides for sequences in adaptive mode; the others take what they ask for.
        proposers: asked in this order, until one has something worth drafting.
        model: the draft model, where there is one.
        vocabulary: the width of the target's logits.
        clock: seconds, for the cost of the draft model's passes.
    """

    def __init__(
        self,
        controller: Controller,
        *proposers: Proposer,
        model: DraftModel | None = None,
        vocabulary: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.controller = controller
        self._proposers = proposers
        self._model = model
        self._vocabulary = vocabulary
        self._clock = clock
        self._deferred: WeakKeyDictionary[Sequence, Proposal] = WeakKeyDictionary()

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model, and it works."""
        return self._model is not None

    @property
    def draft_kv_len(self) -> int:
        """How many tokens of its KV cache a row of the draft model attends to; 0 without a model."""
        return self._model.kv_len if self._model else 0

    def defer(self, proposal: Proposal) -> None:
        """Keep a proposal that a round could not verify to its end, for the sequence's next round.

        That round has the same noise. Other drafts, or fewer, would draw again what verification has already
        accepted, which biases the output.
        """
        proposal.deferred = True
        self._deferred[proposal.sequence] = proposal

    def deferred_tokens(self, sequence: Sequence) -> int | None:
        """The number of draft tokens that a sequence has to verify in its next round; None where it is free."""
        proposal = self._deferred.get(sequence)
        return None if proposal is None else len(proposal.tokens)

    def begin(self, sequence: Sequence, gamma: int, noise: Noise) -> Proposal:
        """The proposal of a sequence for this round: the deferred one, or an empty one."""
        return self._deferred.pop(sequence, None) or Proposal(sequence, gamma, noise)

    def propose(self, proposals: list[Proposal], rows: int, kv_len: int, awaiting_first_token: int = 0) -> None:
        """Add drafts to the proposals, at most `gamma` each.

        Args:
            proposals: empty or deferred, one for each sequence of the round.
            rows: of the target's pass without drafts.
            kv_len: how many tokens a row of that pass attends to.
            awaiting_first_token: how many sequences do.
        """
        drafting = [proposal for proposal in proposals if proposal.gamma > 0 and not proposal.deferred]
        if not drafting:
            return
        decoding = [proposal.sequence for proposal in proposals if proposal.sequence.generated]
        costs = self.controller.costs(decoding, kv_len, self.draft_kv_len, awaiting_first_token)
        rows += sum(len(proposal.tokens) for proposal in proposals)
        for proposal in drafting:
            rows += self._propose_free(proposal, rows, costs)
        while self._model and (chosen := self._choose(drafting, rows, costs)):
            began = self._clock()
            first = ["model" not in proposal.sequence.stats.drafters for proposal in chosen]
            try:
                reading = self._model.read([DraftText(p.sequence, p.tokens) for p in chosen])
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self._model = None
                return
            step = costs.draft(sum(reading.rows)) / max(1, sum(reading.rows))
            for index, proposal in enumerate(chosen):
                read = reading.rows[index]
                proposal.seconds += step * read
                if first[index]:
                    proposal.prefill_seconds += step * (read - 1)
                logits = reading.logits.get(index)
                if logits is None or not self._draw(logits, proposal):
                    proposal.ended = True
                    continue
                rows += 1
                rows += self._propose_free(proposal, rows, costs)
            self._model.took(self._clock() - began)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Only the first `length` tokens of a sequence are decided; the draft model's cache forgets the rest."""
        if self._model:
            self._model.truncate(sequence, length)

    def _propose_free(self, proposal: Proposal, rows: int, costs: RoundCosts) -> int:
        """Draft what the first proposer offers that is worth verifying; how many tokens that is."""
        sequence = proposal.sequence
        for proposer in self._proposers:
            if proposal.remaining <= 0 or sequence.speculation.drafter not in {None, proposer.name}:
                continue
            tokens, confidences = proposer.propose(sequence, proposal.tokens, proposal.remaining)
            if not tokens:
                continue
            probabilities = [self.controller.acceptance(sequence, proposer.name, one) for one in confidences]
            candidate = self._candidate(proposal, costs)
            if sequence.speculation.adaptive:
                known = candidate or Candidate(proposal.prefix, 0.0, 0, 0)
                length = proposal_length(known, probabilities, rows, costs)
            else:
                # So many drafts are wanted in any case; the model gives those that it is likelier to be right about.
                least = candidate.acceptance if candidate else 0.0
                length = next((i for i, probability in enumerate(probabilities) if probability < least), len(tokens))
            for token, one, probability in zip(tokens[:length], confidences, probabilities, strict=False):
                proposal.add(Draft(token, one_hot(token, self._vocabulary), proposer.name, one), probability)
            if length:
                return length
            if not proposal.tokens:
                proposal.undrafted.append(Undrafted(tokens[0], proposer.name, confidences[0]))
        return 0

    def _choose(self, proposals: list[Proposal], rows: int, costs: RoundCosts) -> list[Proposal]:
        """The sequences whose next token the model drafts in this step."""
        able = [(p, self._candidate(p, costs)) for p in proposals if not p.ended and p.remaining > 0]
        fixed = [p for p, candidate in able if candidate and not p.sequence.speculation.adaptive]
        adaptive = [(p, candidate) for p, candidate in able if candidate and p.sequence.speculation.adaptive]
        chosen, _ = model_steps([candidate for _, candidate in adaptive], rows + len(fixed), costs)
        return [*fixed, *(adaptive[index][0] for index in sorted(chosen))]

    def _candidate(self, proposal: Proposal, costs: RoundCosts) -> Candidate | None:
        """What is known of a sequence before the model drafts its next token; None where it cannot or may not."""
        sequence = proposal.sequence
        if self._model is None or sequence.speculation.drafter not in {None, "model"}:
            return None
        text = DraftText(sequence, proposal.tokens)
        pending = self._model.pending(text)
        if not self._model.knows(text):
            return None
        if sequence.speculation.adaptive:
            return self.controller.candidate(sequence, proposal.prefix, pending, proposal.remaining, costs)
        return Candidate(proposal.prefix, self.controller.next_acceptance(sequence), pending, proposal.remaining)

    def _draw(self, logits: FloatArray, proposal: Proposal) -> bool:
        """Draw a draft from the model's logits; False where the grammar leaves none."""
        sequence = proposal.sequence
        try:
            shaped = process_logits(logits, sequence, proposal.tokens)
            best = argmax(shaped)
        except (FloatingPointError, ConstraintError, MaskDeferred):
            # The request's grammar, not the model: verification meets it too, and says what is to be done.
            return False
        if is_greedy(sequence.sampling):
            token, q = best, one_hot(best, self._vocabulary)
        else:
            q = to_distribution(shaped, sequence.sampling)
            token = RULES[sequence.speculation.verification].sample(q, len(proposal.tokens), proposal.noise)
        sure = confidence(shaped)
        proposal.add(Draft(token, q, "model", sure), self.controller.acceptance(sequence, "model", sure))
        return True
