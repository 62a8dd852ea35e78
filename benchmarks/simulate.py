"""What would other policies, and other machines, make of the same texts? Replays recordings through the real engine.

The scheduler, the drafters and the controller are those of the server. Only the two models are tapes: they answer what
the recording says that the real pair answered at that place, and move a clock by what the pass would have cost.

    .venv/bin/python benchmarks/simulate.py [--recordings FILE] [--costs FILE]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.fake import FakeVocabulary
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.serving.generation import Generation
from specserve.serving.scheduler import Scheduler
from specserve.speculation.controller import Controller
from specserve.speculation.cost import Cost, CostTable
from specserve.speculation.drafters import Drafters
from specserve.speculation.guessers import LookupDrafter
from specserve.speculation.model import DraftModel

RECORDINGS = Path(__file__).parent / "recordings"
FIXED = (1, 2, 3, 4, 7, 15)
CONTEXT = 4096
# Tokens that stand in for the rest of the vocabulary, so that a row can be as flat as the recorded one.
_OTHERS = 200


@dataclass(frozen=True)
class Recording:
    """One text of the target, and what the draft said along it.

    Args:
        prompt: its tokens.
        answer: what the target wrote behind them.
        sure: by place of the answer, how sure the target was.
        hit: by place, whether the draft would have written the same token.
        draft_sure: by place, how sure the draft was.
    """

    family: str
    name: str
    temperature: float
    prompt: list[int]
    answer: list[int]
    sure: list[float]
    hit: list[bool]
    draft_sure: list[float]


@dataclass
class Clock:
    """The time of the simulated machine."""

    now: float = 0.0

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self.now


class Tape:
    """An engine of one slot that answers what was recorded, and takes as long as its cost says."""

    n_slots = 1
    max_rows = 128
    max_logits = 64
    slot_length = CONTEXT

    def __init__(self, cost: Cost, clock: Clock, *, draft: bool) -> None:
        self._cost = cost
        self._clock = clock
        self._draft = draft
        self.cells = 0
        self.width = 0

    def play(self, recording: Recording, sequence: Sequence, names: dict[int, int]) -> None:
        """From now on answer for this text, whose tokens have these numbers."""
        self._recording = recording
        self._sequence = sequence
        self._names = names
        self.width = len(names) + 1 + _OTHERS
        self.cells = 0

    def forward(self, rows: list[Row]) -> FloatArray:
        """What was recorded behind each row; see `Engine.forward`."""
        self._clock.now += self._cost.seconds(len(rows), self.cells)
        self.cells = rows[-1].position + 1
        start = self._sequence.draft_start if self._draft else 0
        first = len(self._recording.prompt) - 1
        return np.array([self._row(start + row.position - first) for row in rows if row.wants_logits], np.float32)

    def _row(self, place: int) -> list[float]:
        recording = self._recording
        place = min(max(0, place), len(recording.answer) - 1)
        right = recording.hit[place] if self._draft else True
        sure = recording.draft_sure[place] if self._draft else recording.sure[place]
        favourite = self._names[recording.answer[place]] if right else 0
        sure = min(1 - 1e-6, max(sure, 1.5 / self.width))
        row = [float(np.log((1 - sure) / (self.width - 1)))] * self.width
        row[favourite] = float(np.log(sure))
        return row

    def cut(self, _slot: int, length: int) -> None:
        """Forget what is behind."""
        self.cells = min(self.cells, length)

    def copy(self, source: int, destination: int, length: int) -> None:
        """There is one slot only."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


class Endless(FakeVocabulary):
    """A vocabulary in which no token ends a text: that is where its recording does."""

    def ends_text(self, token: int) -> bool:
        """Never."""
        del token
        return False


class Simulation:
    """A server whose two models are tapes; what it learns of one text it keeps for the next.

    Args:
        target: the cost of the target on the simulated machine.
        draft: that of the draft.
        speculation: the policy.
        window: how far back the draft reads.
    """

    def __init__(self, target: CostTable, draft: CostTable, speculation: SpeculationParams, window: int = 256) -> None:
        self._clock = Clock()
        costs = [Cost(table, most=64) for table in (target, draft)]
        self._tapes = [Tape(cost, self._clock, draft=draft) for cost, draft in zip(costs, (False, True), strict=True)]
        self._draft_cost = Cost(draft, most=64)
        self._controller = Controller(Cost(target, most=64), self._draft_cost)
        self._speculation = speculation
        self._window = window

    def run(self, recording: Recording) -> tuple[float, Sequence]:
        """Seconds behind the first token, and the sequence with its account."""
        known = dict.fromkeys([*recording.prompt, *recording.answer])
        names = {token: number for number, token in enumerate(known, 1)}
        prompt = [names[token] for token in recording.prompt]
        sequence = Sequence(prompt, SamplingParams(temperature=0), self._speculation, max_tokens=len(recording.answer))
        for tape in self._tapes:
            tape.play(recording, sequence, names)
        target, draft = self._tapes
        model = DraftModel(
            draft,
            self._draft_cost,
            window=self._window,
            max_rows=64,
            vocabulary=target.width,
            context_length=CONTEXT,
        )
        drafters = Drafters(self._controller, LookupDrafter(), model=model, vocabulary=target.width, clock=self._clock)
        scheduler = Scheduler(target, drafters, prefill_rows=64, idle_tokens=0, clock=self._clock)
        scheduler.submit(Generation(sequence, Endless(200), []))
        while scheduler.busy:
            scheduler.step()
        return sequence.account.decode_seconds, sequence


def oracle(recording: Recording, target: Cost, draft: Cost, most: int = 16) -> float:
    """The least seconds that any number of drafts a round could have taken, knowing which of them stay.

    Dynamic programming over the places of the answer, from its end; the draft's arrears are free.
    """
    count = len(recording.answer)
    cells = len(recording.prompt) + count // 2
    step = draft.seconds(1, cells)
    best = [0.0] * (count + 1)
    for place in range(count - 1, 0, -1):
        stay = 0
        options = [target.seconds(1, cells) + best[place + 1]]
        for gamma in range(1, min(most, count - place - 1) + 1):
            stay += int(stay == gamma - 1 and recording.hit[place + gamma - 1])
            options.append(gamma * step + target.seconds(gamma + 1, cells) + best[place + stay + 1])
        best[place] = min(options)
    return best[1]


def read_recordings(path: Path) -> list[Recording]:
    """All recordings of a file, one JSON object a line."""
    with path.open(encoding="utf-8") as file:
        return [Recording(**json.loads(line)) for line in file]
