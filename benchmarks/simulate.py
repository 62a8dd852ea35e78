"""How much faster are recorded texts decoded with drafts, on this machine and on others? A simulation.

Scheduler, drafters and controller are those of the server. Only the two engines are replaced: they return the recorded
logits of a real pair, and advance a simulated clock by the cost of each pass.

    .venv/bin/python benchmarks/simulate.py [--recordings FILE] [--machines NAME ...] [--orders N]
        [--set acceptance._FADE=.7 ...] [--clients 2 4 8]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import numpy as np

from common import print_result, print_table
from specserve.core.scheduler import Scheduler, max_wait
from specserve.core.text_sequence import TextSequence
from specserve.engine.base import FloatArray, Row
from specserve.engine.kv_cache import KVCache
from specserve.sequence import SamplingParams, SpeculationParams
from specserve.speculation.costs import CostTable, PassCosts
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.ngram import LookupProposer
from specserve.speculation.policy import Controller

# The fakes belong to the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from fake_engine import FakeEngine, NoEndToken

RECORDINGS = Path(__file__).parent / "recordings" / "coder-0.5b-1.5b.jsonl"
CONTEXT = 4096
# Tokens that stand for the rest of the vocabulary, so that logits can have the recorded entropy.
_OTHERS = 200
# A token that no text has.
_MASK = 0


@dataclass(frozen=True)
class Recording:
    """One answer of the target, and the draft's predictions along it (see record.py)."""

    family: str
    name: str
    temperature: float
    prompt: list[int]
    answer: list[int]
    # By index of the answer:
    sure: list[float]  # the target's confidence
    rank: list[int]  # the token's place among the draft's choices; 0 where the draft chooses the same token
    draft_sure: list[float]  # the draft's confidence
    others: list[list[float]]  # the probabilities of the draft's choices after the first
    # Rank and confidence of the tokens that follow, behind 1, 2, ... masks; none of a draft that knows no masks.
    masked: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def block_length(self) -> int:
        return 1 + max(map(len, self.masked), default=0)


@dataclass
class Clock:
    now: float = 0.0  # seconds since the start

    def __call__(self) -> float:
        return self.now


class EndlessVocabulary(NoEndToken):
    """An answer ends with its recording, and its tokens have no text."""

    def piece(self, token: int) -> bytes:
        del token
        return b""


@dataclass(frozen=True)
class Replay:
    """A recording that is being replayed as a sequence, with its tokens renumbered to a small vocabulary.

    The last tokens occur in no recording. Each replay begins with a token of its own, so that no two share a prefix.
    """

    recording: Recording
    sequence: TextSequence
    names: dict[int, int]

    @classmethod
    def begin(cls, recording: Recording, number: int, vocabulary: int, speculation: SpeculationParams) -> Replay:
        """Replay number `number` of those that run together."""
        known = dict.fromkeys([*recording.prompt, *recording.answer])
        names = {token: number for number, token in enumerate(known, 1)}
        prompt = [vocabulary - 1 - number, *(names[token] for token in recording.prompt)]
        sequence = TextSequence(
            prompt,
            SamplingParams(temperature=0),
            speculation,
            EndlessVocabulary(200),
            max_tokens=len(recording.answer),
            reuses_prefix=False,
        )
        return cls(recording, sequence, names)


class ReplayEngine(FakeEngine):
    """An engine that returns recorded logits and advances the clock by the cost of each pass.

    `replays` are all of them, also those that wait for a slot.
    """

    def __init__(
        self, replays: list[Replay], width: int, cost: PassCosts, clock: Clock, n_slots: int, *, draft: bool
    ) -> None:
        super().__init__(vocabulary=width, n_slots=n_slots)
        self.max_rows = 128
        self._replays = replays
        self._cost = cost
        self._clock = clock
        self._draft = draft
        self.record = KVCache(self)

    def forward(self, rows: list[Row]) -> FloatArray:
        self._clock.now += self._cost.seconds(len(rows), self.kv_len(row.slot for row in rows))
        super().forward([row._replace(wants_logits=False) for row in rows])
        # By slot, how many masks a row follows and is.
        masks: Counter[int] = Counter()
        logits = []
        for row in rows:
            masks[row.slot] += row.token == _MASK
            if row.wants_logits:
                logits.append(self._row(row, masks[row.slot]))
        return np.array(logits, np.float32)

    def _row(self, asked: Row, masks: int) -> list[float]:
        # A slot belongs to the replay that got it last.
        replay = next(
            (candidate for candidate in reversed(self._replays) if candidate.sequence.slot == asked.slot),
            self._replays[0],
        )
        recording = replay.recording
        start = self.record.start(asked.slot)
        index = start + asked.position - (replay.sequence.prompt_length - 1)
        index = min(max(0, index), len(recording.answer) - 1)
        rank = recording.rank[index] if self._draft else 0
        sure = recording.draft_sure[index] if self._draft else recording.sure[index]
        choices = [sure, *(recording.others[index] if self._draft else [])]
        if masks:
            behind = recording.masked[max(0, index - masks)]
            rank, sure = behind[masks - 1] if masks <= len(behind) else (1, 0.1)
            # What follows the first choice was not recorded.
            choices = [sure, *[(1 - sure) / 4] * 2]
        # A tie would be decided by the tokens' numbers.
        choices = [max(1.5 / self.width, p) * (1 - 1e-4 * place) for place, p in enumerate(choices)]
        rest = max(1e-6, 1 - sum(choices)) / (self.width - len(choices))
        row = [math.log(min(rest, choices[-1] / 2))] * self.width
        # Wrong choices are tokens that occur in no recording.
        wrong = iter(range(self.width - len(self._replays) - len(choices), self.width))
        right = replay.names[recording.answer[index]]
        for place, p in enumerate(choices):
            row[right if place == rank else next(wrong)] = math.log(min(p, 1 - 1e-6))
        return row


class Simulation:
    """A server with replayed models, whose controller keeps learning from one recording to the next.

    Args:
        target: the target's costs on the simulated machine.
        draft: the draft's.
        speculation: the policy.
        draft_context: the most tokens of a sequence that the draft holds.
        slots: sequences decoded at the same time.
        max_wait_seconds: extra latency that prefill may add to a decoding round.
    """

    def __init__(
        self,
        target: CostTable,
        draft: CostTable,
        speculation: SpeculationParams,
        *,
        draft_context: int = CONTEXT,
        slots: int = 1,
        max_wait_seconds: float = math.inf,
    ) -> None:
        self._clock = Clock()
        self._tables = target, draft
        target_cost = PassCosts(target)
        self._draft_cost = PassCosts(draft, target=target_cost)
        self._controller = Controller(target_cost, self._draft_cost)
        self._speculation = speculation
        self._draft_context = draft_context
        self._slots = slots
        self._max_wait_seconds = max_wait_seconds

    def run(self, recording: Recording) -> tuple[float, TextSequence]:
        """Seconds after the first token, and the sequence with its statistics."""
        _, (sequence,) = self.together([recording])
        return sequence.stats.decode_seconds, sequence

    def together(self, recordings: list[Recording]) -> tuple[list[float], list[TextSequence]]:
        """Seconds until each of several answers is complete that are requested at once, and their sequences."""
        width = max(len({*r.prompt, *r.answer}) for r in recordings) + 1 + _OTHERS
        self._controller.block_length = max(recording.block_length for recording in recordings)
        replays = [Replay.begin(r, number, width, self._speculation) for number, r in enumerate(recordings)]
        target, draft = (
            ReplayEngine(replays, width, PassCosts(table), self._clock, self._slots, draft=is_draft)
            for table, is_draft in zip(self._tables, (False, True), strict=True)
        )
        model = DraftModel(
            draft.record,
            self._draft_cost,
            window=96,  # changes no draft here: all were recorded after 128 tokens
            max_rows=64,
            vocabulary=width,
            context_length=self._draft_context,
            mask_token=_MASK,
        )
        scheduler = Scheduler(
            target.record,
            Drafters(
                self._controller, LookupProposer(), model=model, vocabulary=width, end_tokens=(), clock=self._clock
            ),
            prefill_rows=64,
            max_wait_seconds=self._max_wait_seconds,
            clock=self._clock,
        )
        sequences = [replay.sequence for replay in replays]
        for sequence in sequences:
            scheduler.submit(sequence)
        begun = self._clock()
        ends: dict[TextSequence, float] = {}
        while scheduler.busy:
            scheduler.run_round()
            for sequence in sequences:
                if sequence.done:
                    ends.setdefault(sequence, self._clock() - begun)
        return [ends[sequence] for sequence in sequences], sequences


def read_recordings(path: Path = RECORDINGS) -> list[Recording]:
    """All recordings of a file, one JSON object a line."""
    with path.open(encoding="utf-8") as file:
        return [Recording(**json.loads(line)) for line in file]


def synthetic(kind: str, length: int = 400, seed: int = 1) -> Recording:
    """A synthetic recording whose acceptance follows a random process; lookup finds nothing in it.

    Args:
        kind: `easy`, `hard`, `bursty` (easy and hard runs), `story then code` (the first half is hard), or
            `adversarial` (both models are confident, and the draft is always wrong).
        length: tokens of the answer.
        seed: of the process.
    """
    generator = np.random.default_rng(seed)
    index = np.arange(length)
    probabilities = {
        "easy": np.full(length, 0.95),
        "hard": np.full(length, 0.4),
        "bursty": np.where(index // 25 % 2 == 0, 0.97, 0.4),
        "story then code": np.where(index < length // 2, 0.45, 0.95),
        "adversarial": np.full(length, 0.98),
    }[kind]
    # The models' confidence scatters around the draft's probability of being right.
    sure = np.clip(1 / (1 + (1 / probabilities - 1) * np.exp(generator.normal(0, 1.5, (2, length)))), 0.02, 0.9995)
    hit = np.zeros(length, bool) if kind == "adversarial" else generator.random(length) < sure.mean(axis=0)
    tokens = list(range(1, 101 + length))
    # Alternatives are never right.
    rank, others = np.where(hit, 0, 2).tolist(), [[0.5 * (1 - confidence)] for confidence in sure[1].tolist()]
    return Recording(
        "synthetic", kind, 0.0, tokens[:100], tokens[100:], sure[0].tolist(), rank, sure[1].tolist(), others
    )


PROCESSES = ("easy", "hard", "bursty", "story then code", "adversarial")


def stairs(first: float, steps: dict[int, float]) -> CostTable:
    """A cost table: milliseconds of one row, and by number of rows the multiple of that; 5 % more at 512 tokens."""
    short = tuple(first / 1000 * factor for factor in (1.0, *steps.values()))
    return CostTable((1, *steps), (64, 512), (short, tuple(1.05 * seconds for seconds in short)))


# Cost by rows, 2 cores of an Intel Xeon (slow memory), llama.cpp's kernels, pure Q4_0: medians of four starts.
_TWO_CORES = {2: 1.67, 3: 2.3, 4: 1.54, 5: 2.5, 6: 3.3, 8: 3.17, 12: 4.6, 16: 5.1, 24: 8.0, 32: 9.8}
# Our kernels on 2 cores of an AMD EPYC (Zen 4): where the cores lie on two core complexes (cost_curve.py), and on one.
_OWN_TARGET_FAST = {2: 1.15, 4: 1.37, 5: 1.55, 6: 1.81, 8: 2.36, 12: 3.28, 16: 3.93, 32: 7.1, 64: 13.5, 128: 26.9}
_OWN_DRAFT_FAST = {2: 1.08, 4: 1.4, 5: 1.71, 6: 1.96, 8: 2.49, 12: 3.59, 16: 4.8, 32: 8.6, 64: 12.7, 128: 25.5}
_OWN_TARGET_SLOW = {2: 1.0, 4: 1.06, 5: 1.11, 6: 1.12, 8: 1.36, 12: 1.96, 16: 2.59, 32: 4.7, 64: 9.0, 128: 18.1}
_OWN_DRAFT_SLOW = {2: 1.02, 4: 1.12, 5: 1.3, 6: 1.45, 8: 1.8, 12: 2.6, 16: 3.4, 32: 6.4, 64: 11.5, 128: 21.6}
# The same on 2 cores of an AMD EPYC (Zen 3) with AVX2 alone (cost_curve.py).
_ZEN_3_TARGET = {2: 1.02, 4: 1.05, 5: 1.34, 6: 1.56, 8: 2.12, 12: 2.81, 16: 3.93, 32: 7.1, 64: 12.9, 128: 25.8}
_ZEN_3_DRAFT = {2: 1.05, 4: 1.4, 5: 1.71, 6: 1.76, 8: 2.1, 12: 3.05, 16: 3.96, 32: 7.1, 64: 11.7, 128: 23.4}
# The same on 2 cores of an AMD EPYC (Zen 5), as the server measures at its first start.
_ZEN_5_TARGET = {2: 1.01, 3: 1.02, 4: 1.01, 6: 1.01, 8: 1.01, 12: 1.27, 16: 1.53, 17: 1.67, 24: 2.26, 32: 2.9}
_ZEN_5_DRAFT = {2: 1.01, 3: 1.03, 4: 1.05, 6: 1.1, 8: 1.13, 12: 1.54, 16: 2.0, 17: 2.23, 24: 2.95, 32: 3.79}
# The same where the two cores share no cache, which makes memory faster: passes of the cost-matched 3B and of the
# draft, medians of several processes in turns (no command prints them).
_ZEN_5_APART_TARGET = {2: 1.06, 4: 1.07, 5: 1.1, 6: 1.16, 8: 1.42, 12: 1.97, 16: 2.53, 17: 3.01, 24: 3.79, 32: 4.88}
_ZEN_5_APART_DRAFT = {2: 1.04, 3: 1.1, 4: 1.15, 6: 1.25, 8: 1.4, 12: 1.94, 16: 2.5, 17: 2.83, 24: 3.65, 32: 4.73}
# Assumed: every row costs the same.
_STEEP = {2: 1.9, 3: 2.8, 4: 3.6, 8: 7.0, 16: 14.0, 32: 28.0}
# Milliseconds a step and costs by rows, of target and draft.
_COSTS = {
    "2 cores, 3B by 0.5B": (145, _TWO_CORES, 26, _TWO_CORES),
    "2 cores, 1.5B by 0.5B": (71, _TWO_CORES, 26, _TWO_CORES),
    "2 cores of Zen 4, fast memory, our kernels, 1.5B by 0.5B": (20.5, _OWN_TARGET_FAST, 5.5, _OWN_DRAFT_FAST),
    "2 cores of Zen 4, slow memory, our kernels, 1.5B by 0.5B": (30.3, _OWN_TARGET_SLOW, 7.6, _OWN_DRAFT_SLOW),
    "2 cores of Zen 3, our kernels, 1.5B by 0.5B": (58.8, _ZEN_3_TARGET, 14.5, _ZEN_3_DRAFT),
    "2 cores of Zen 5, our kernels, 1.5B by 0.5B": (26.7, _ZEN_5_TARGET, 6.1, _ZEN_5_DRAFT),
    "2 cores of Zen 5 apart, our kernels, 3B by 0.5B": (32, _ZEN_5_APART_TARGET, 4.8, _ZEN_5_APART_DRAFT),
    "every row costs alike": (145, _STEEP, 26, _STEEP),
}
MACHINES = {
    name: (stairs(first, target), stairs(second, draft)) for name, (first, target, second, draft) in _COSTS.items()
}


def replay_all(
    target: CostTable, draft: CostTable, policy: SpeculationParams, recordings: list[Recording], seed: int
) -> list[float]:
    """Seconds of each recording, replayed in a random order, as a server would see them."""
    simulation, order = Simulation(target, draft, policy), [*enumerate(recordings)]
    Random(seed).shuffle(order)
    seconds = {index: simulation.run(recording)[0] for index, recording in order}
    return [seconds[index] for index in sorted(seconds)]


def compare(target: CostTable, draft: CostTable, recordings: list[Recording], orders: int) -> Iterator[dict[str, Any]]:
    """Rows of the result for one machine: speed of `auto` in times the speed of `off`, by family and temperature.

    Since `auto` learns from one answer for the next, its seconds are means over several orders of the recordings.
    """
    plain = replay_all(target, draft, SpeculationParams(mode="off"), recordings, 1)
    runs = [
        replay_all(target, draft, SpeculationParams(15, mode="auto"), recordings, seed) for seed in range(1, orders + 1)
    ]
    ratios: dict[tuple[str, float], list[float]] = {}
    for recording, off, *auto in zip(recordings, plain, *runs, strict=True):
        family = recording.name if recording.family == "synthetic" else recording.family
        ratios.setdefault((family, recording.temperature), []).append(off / mean(auto))
    for (family, temperature), values in sorted(ratios.items(), key=lambda row: (row[0][0] in PROCESSES, *row[0])):
        yield {
            "family": family,
            "temperature": temperature,
            "mode": "adaptive",
            "ratio": round(mean(values), 3),
            "least": round(min(values), 3),
            "recordings": len(values),
        }


def together(
    target: CostTable, draft: CostTable, recordings: list[Recording], clients: int, orders: int
) -> dict[str, Any]:
    """How much faster `auto` answers all recordings than `off`, if so many are decoded at a time; prefill included."""
    ratios = []
    wait = max_wait(None, PassCosts(target))
    for seed in range(1, orders + 1):
        order = list(recordings)
        Random(seed).shuffle(order)
        seconds = {}
        for speculation in (SpeculationParams(mode="off"), SpeculationParams(15, mode="auto")):
            simulation = Simulation(target, draft, speculation, slots=clients, max_wait_seconds=wait)
            seconds[speculation.mode] = max(simulation.together(order)[0])
        ratios.append(seconds["off"] / seconds["auto"])
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    return {"clients": clients, "ratio": round(mean(ratios), 3), "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="a file that record.py wrote")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), help="only these machines")
    parser.add_argument("--orders", type=int, default=6, help="so many orders of the recordings (%(default)s)")
    parser.add_argument("--clients", nargs="+", type=int, help="so many recordings at a time instead of one")
    parser.add_argument("--set", nargs="+", default=[], metavar="MODULE.NAME=VALUE", help="constants of speculation/")
    options = parser.parse_args()
    for constant in options.set:
        name, value = constant.split("=")
        module, name = name.split(".")
        setattr(import_module(f"specserve.speculation.{module}"), name, float(value))
    recorded = read_recordings(options.recordings)
    if options.clients:
        rows = [
            {"machine": machine, **together(*MACHINES[machine], recorded, clients, options.orders)}
            for machine in options.machines
            for clients in options.clients
        ]
        for row in rows:
            print(f"{row['machine']}, {row['clients']} clients: {row['ratio']} {row['spread']}")
        print_result("simulate", {}, rows, ["`auto` / `off`, all answers; simulated"])
        return
    recordings = recorded + [synthetic(kind) for kind in PROCESSES]
    rows = []
    for machine in options.machines:
        mine = list(compare(*MACHINES[machine], recordings, options.orders))
        print_table(f"SIMULATION: {machine}; times the speed without drafts, draft prefill included", mine)
        ratios, least = zip(
            *((row["ratio"], row["least"]) for row in mine if row["family"] not in PROCESSES), strict=True
        )
        print(f"recorded texts: mean {mean(ratios):.3f}, slowest {min(least):.3f}\n")
        rows += [{"machine": machine, **row} for row in mine]
    print_result("simulate", {}, rows, ["simulated: recorded answers, measured or assumed costs"])


if __name__ == "__main__":
    main()
