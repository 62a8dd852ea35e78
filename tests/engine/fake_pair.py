"""A scheduler over a fake target and a fake draft model, which refuse rows that do not continue their KV caches."""

import math
from collections import abc
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from constraints import Alternating, Shared
from costs import proportional
from fake_engine import FakeEngine, FakeVocabulary
from specserve.core.scheduler import Scheduler
from specserve.core.text_sequence import TextParams, TextSequence
from specserve.engine.kv_cache import KVCache
from specserve.observability.records import EndRecord, Observer
from specserve.sampling.distribution import to_distribution
from specserve.sampling.logits import penalise
from specserve.sequence import (
    DrafterName,
    Pool,
    RequestInfo,
    SamplingParams,
    Sequence,
    SpeculationMode,
    SpeculationParams,
    Verification,
)
from specserve.speculation.costs import PassCosts
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.ngram import PredictionProposer
from specserve.speculation.policy import Controller
from specserve.speculation.proposers import Proposal, Proposer
from specserve.speculation.step import SequenceStep

VOCABULARY = 24
END_TOKEN = VOCABULARY - 1
SLOTS = 3
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=7)
ENDLESS = SamplingParams(temperature=0, logit_bias=((END_TOKEN, -math.inf),))


class FakePair:
    """Target and draft model with their scheduler; every step checks both KV caches.

    `options` are further arguments of `Scheduler`; `proposers` are asked before the draft model, by default for the
    client's prediction. `records` are of all rounds and ends, and `masks` is the budget that `Slow` grammars share.
    """

    def __init__(
        self,
        *,
        vocabulary: FakeVocabulary | None = None,
        blend: float = 0.3,  # how much the draft model differs from the target, from 0 to 1
        prefill_rows: int = 8,
        draft_rows: int = 8,
        draft_width: int | None = None,  # the size of the draft model's vocabulary
        window: int = 4096,  # the longest draft prefill, in tokens
        context: int = 8192,  # of the draft model, in tokens
        block_length: int = 1,  # that the draft model drafts in one pass
        costs: tuple[PassCosts, PassCosts] | None = None,  # of the passes of target and draft model
        masks: int = 10**9,  # that a round has time for
        proposers: abc.Sequence[Proposer] | None = None,
        n_cells: int | None = None,
        slots: int = SLOTS,
        **options: Any,
    ) -> None:
        self.vocabulary = vocabulary or FakeVocabulary(VOCABULARY)
        width = self.vocabulary.size
        self.target = FakeEngine(vocabulary=width, n_slots=slots, n_cells=n_cells)
        # The mask is a token that the target does not have.
        mask = width if block_length > 1 else -1
        self.draft = FakeEngine(vocabulary=draft_width or width + (block_length > 1), n_slots=slots, blend=blend)
        self.draft.slot_length = context
        target_cost, draft_cost = costs or (proportional(), proportional())
        self.target_cache, self.draft_cache = KVCache(self.target), KVCache(self.draft)
        model = DraftModel(
            self.draft_cache,
            draft_cost,
            window=window,
            max_rows=draft_rows,
            vocabulary=width,
            context_length=context,
            mask_token=mask,
        )
        self.controller = Controller(target_cost, draft_cost, block_length=block_length)
        free_drafters = [PredictionProposer()] if proposers is None else proposers
        ends = self.vocabulary.end_tokens()
        clock = options.get("clock", perf_counter)
        self.drafters = Drafters(self.controller, *free_drafters, model=model, end_tokens=ends, clock=clock)
        self.masks, self.records = Shared(masks), RecordingObserver()
        observers = [*options.pop("observers", ()), self.records]
        options = {"limit_masks": self.masks.limit_masks, "observers": observers, **options}
        self.scheduler = Scheduler(self.target_cache, self.drafters, prefill_rows=prefill_rows, **options)
        # The slot of each sequence when the caches were last checked, and by slot the sequence that got it last.
        self._slots: dict[TextSequence, int] = {}
        self._holders: dict[int, TextSequence] = {}

    def submit(
        self,
        prompt: list[int],
        *,
        gamma: int = 3,
        verification: Verification = "block",
        drafter: DrafterName | None = None,
        mode: SpeculationMode = "fixed",
        sampling: SamplingParams = GREEDY,
        max_tokens: int = 20,
        stops: abc.Sequence[str] = (),
        request: str = "",
        client: str = "",
        salt: str = "",
        pool: Pool | None = None,
        **options: Any,
    ) -> TextSequence:
        """Queue a sequence; `options` are further arguments of `Sequence`."""
        speculation = SpeculationParams(gamma, verification, drafter, mode, pool)
        options |= {"info": RequestInfo(request, client=client, cache_salt=salt), "max_tokens": max_tokens}
        sequence = TextSequence(prompt, sampling, speculation, self.vocabulary, TextParams(stops), **options)
        self.scheduler.submit(sequence)
        self._slots[sequence] = sequence.slot
        return sequence

    def answer(self, prompt: list[int], **options: Any) -> TextSequence:
        """Queue a sequence, as `submit` does, and run rounds until all are done."""
        [sequence] = self.answers([prompt], **options)
        return sequence

    def answers(self, prompts: Iterable[list[int]], **options: Any) -> list[TextSequence]:
        """Queue sequences that differ in their prompts, and run rounds until all are done."""
        sequences = [self.submit(prompt, **options) for prompt in prompts]
        self.run()
        return sequences

    def step(self, count: int = 1) -> None:
        """Run rounds, and compare both KV caches with the sequences' tokens after each."""
        for _ in range(count):
            self.scheduler.run_round()
            self._check_caches()

    def run(self, *sequences: TextSequence) -> None:
        """Run rounds until these sequences are done, or all if none are given."""
        self.run_until(lambda: all(sequence.done for sequence in sequences) if sequences else not self.scheduler.busy)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run rounds until the condition holds."""
        for _ in range(10_000):
            if condition():
                return
            self.step()
        raise AssertionError("The condition does not hold after 10,000 rounds.")

    def _check_caches(self) -> None:
        for sequence, before in self._slots.items():
            if sequence.slot not in {before, -1}:
                self._holders[sequence.slot] = sequence
            self._slots[sequence] = sequence.slot
        for slot, sequence in self._holders.items():
            assert self.target.cache[slot] == sequence.tokens[: self.target_cache.num_computed_tokens(slot)]
            if self.drafters.model:
                start, end = self.draft_cache.start(slot), self.draft_cache.num_computed_tokens(slot)
                assert self.draft.cache[slot] == sequence.tokens[start:end]
        assert self.target_cache.check()
        assert not self.drafters.model or self.draft_cache.check()


class RecordingObserver(Observer):
    """Keeps every step and end record."""

    def __init__(self) -> None:
        self.rounds: list[SequenceStep] = []
        self.ends: list[EndRecord] = []

    def round(self, step: SequenceStep) -> None:
        self.rounds.append(step)

    def end(self, record: EndRecord) -> None:
        self.ends.append(record)


def plain_greedy(prompt: list[int], max_tokens: int, *, endless: bool = False) -> list[int]:
    """The target's greedy output without its end token, or as ENDLESS has it, without a cache and without drafts."""
    target = FakeEngine(vocabulary=VOCABULARY, n_slots=1)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = int(np.argmax(target.logits(tokens)[: END_TOKEN if endless else None]))
        if token == END_TOKEN:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def exact_answers(
    prompt: list[int],
    length: int,
    sampling: SamplingParams,
    vocabulary: FakeVocabulary,
    grammar: Alternating | None = None,
) -> dict[tuple[int, ...], float]:
    """The probability of every answer of the target of at most so many tokens, its end token not counted."""
    target = FakeEngine(vocabulary=vocabulary.size, n_slots=1)
    exact: dict[tuple[int, ...], float] = {}

    def extend(answer: tuple[int, ...], probability: float) -> None:
        if len(answer) == length:
            exact[answer] = probability
            return
        logits = penalise(target.logits([*prompt, *answer]), sampling, np.array(prompt, np.intp), answer)
        if grammar is not None:
            logits = np.where(grammar.allowed(answer), logits, -np.inf)
        for token in range(vocabulary.size):
            is_early = token in sampling.end_tokens and len(answer) < sampling.min_tokens
            if is_early or token not in (sampling.allowed_tokens or [token]):
                logits[token] = -np.inf
        for token, p in enumerate(to_distribution(logits, sampling)):
            if vocabulary.is_end_token(token):
                exact[answer] = probability * float(p)
            elif p > 0:
                extend((*answer, token), probability * float(p))

    extend((), 1.0)
    return exact


def detokenize(tokens: list[int]) -> str:
    """The text of these tokens."""
    return b"".join(map(FakeVocabulary(VOCABULARY).piece, tokens)).decode()


def scripted(drafter: DrafterName, script: list[int], asked: list[list[int]], confidence: float = 0.9) -> Proposer:
    """A drafter that proposes the rest of an answer; `asked` gets the drafts it is asked after."""

    class Scripted(Proposer):
        name: ClassVar[DrafterName] = drafter

        def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
            asked.append(drafts)
            tokens = script[sequence.generated + len(drafts) :][:max_tokens]
            return Proposal(tokens, [confidence] * len(tokens))

    return Scripted()
