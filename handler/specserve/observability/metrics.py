"""Counters, gauges and histograms for Prometheus, collected here and sent every few seconds."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from specserve.observability.control_group import Holdback
from specserve.observability.records import EndRecord
from specserve.speculation.step import SequenceStep

Kind = Literal["counter", "gauge", "histogram"]
# Prompt families come from clients: this many have a label of their own, the others share `other`.
_MAX_FAMILIES = 20
# Rounds without drafts after which speculation counts as paused for a sequence.
_PAUSE_ROUNDS = 8
# Seconds between two emissions while sequences are running; with none, metrics are sent at once.
_INTERVAL = 2.0


class Metric(NamedTuple):
    kind: Kind
    name: str
    labels: tuple[str, ...]


class Served(NamedTuple):
    """The model's name and version in TorchServe: the first labels of every metric."""

    model: str
    version: str


# Is given a value to add to a counter, to set a gauge to, or to observe in a histogram, with its labels.
Send = Callable[[Metric, tuple[str, ...], float], None]


def _metric(kind: Kind, name: str, *labels: str) -> Metric:
    return Metric(kind, f"specserve_{name}", (*Served._fields, *labels))


ROUNDS = _metric("counter", "rounds_total", "family", "drafter")
GAMMA = _metric("counter", "gamma_total", "family", "gamma")
DRAFTED = _metric("counter", "draft_tokens_total", "family", "drafter")
ACCEPTED = _metric("counter", "accepted_tokens_total", "family", "drafter", "position")
EMITTED = _metric("counter", "emitted_tokens_total", "family", "group")
PROMPT = _metric("counter", "prompt_tokens_total", "family")
CACHED = _metric("counter", "prefix_cached_tokens_total", "family")
SEQUENCES = _metric("counter", "texts_total", "family", "group", "reason")
DRAFT_SECONDS = _metric("counter", "draft_seconds_total", "family")
TARGET_SECONDS = _metric("counter", "target_seconds_total", "family")
OTHER_SECONDS = _metric("counter", "other_seconds_total", "family")
PAUSED = _metric("counter", "speculation_paused_total", "family")
TTFT = _metric("histogram", "time_to_first_token_seconds", "family", "group")
TPOT = _metric("histogram", "time_per_output_token_seconds", "family", "group")
WAIT = _metric("histogram", "wait_seconds", "family")
LIVE = _metric("gauge", "live_sequences")
WAITING = _metric("gauge", "waiting_sequences")
SLOTS = _metric("gauge", "slots")
OWN_KERNELS = _metric("gauge", "own_kernels")
THREADS = _metric("gauge", "compute_threads")
MAX_MEMORY = _metric("gauge", "max_memory_bytes")
DRAFT_MODEL = _metric("gauge", "draft_model_up")
HOLDBACK = _metric("gauge", "holdback_speedup", "bound")
ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class Metrics:
    """An observer that counts, and sends what it has counted; tells the holdback what may be compared."""

    def __init__(self, served: Served, holdback: Holdback, send: Send, clock: Callable[[], float]) -> None:
        self._served = served
        self._holdback = holdback
        self._send = send
        self._clock = clock
        self._last_sent = -_INTERVAL
        self._draft_model_up = False
        self._families: set[str] = set()
        self._counts: defaultdict[tuple[Metric, tuple[str, ...]], float] = defaultdict(float)
        self._observed: list[tuple[Metric, tuple[str, ...], float]] = []
        # By request and choice, how many of a sequence's last rounds had no drafts.
        self._rounds_without_drafts: dict[tuple[str, int], int] = {}

    def round(self, step: SequenceStep) -> None:
        info = step.sequence.info
        family = self.family(info.family)
        self._count(DRAFT_SECONDS, step.seconds.draft, family)
        self._count(TARGET_SECONDS, step.seconds.target, family)
        self._count(OTHER_SECONDS, step.seconds.other, family)
        self._count(EMITTED, len(step.emitted), family, info.group)
        if not step.is_decode_round:
            return
        drafters = step.drafted_by
        self._count(ROUNDS, 1, family, drafters[0] if drafters else "none")
        self._count(GAMMA, 1, family, str(len(drafters)))
        for position, drafter in enumerate(drafters, 1):
            self._count(DRAFTED, 1, family, drafter)
            if position <= step.n_emitted_drafts:
                self._count(ACCEPTED, 1, family, drafter, str(position))
        if info.group == "auto":
            key = info.request, step.sequence.index
            without = 0 if drafters else self._rounds_without_drafts.get(key, 0) + 1
            self._rounds_without_drafts[key] = without
            self._count(PAUSED, without == _PAUSE_ROUNDS, family)

    def end(self, record: EndRecord) -> None:
        family, group = self.family(record.info.family), record.info.group
        self._rounds_without_drafts.pop((record.info.request, record.choice), None)
        self._count(SEQUENCES, 1, family, group, record.reason)
        self._count(PROMPT, record.prompt_tokens, family)
        self._count(CACHED, record.cached_tokens, family)
        self._observe(WAIT, record.waited, family)
        if record.ttft is not None:
            self._observe(TTFT, record.ttft, family, group)
        if record.tpot is not None:
            self._observe(TPOT, record.tpot, family, group)
            # Requests are drawn, not sequences, so each counts once.
            if record.info.randomised and record.choice == 0:
                self._holdback.observe(record.tpot, plain=group == "holdback")

    def family(self, name: str) -> str:
        """The label of a prompt family; their number is bounded."""
        if name in {"", "other"}:
            return name or "none"
        if name not in self._families and len(self._families) >= _MAX_FAMILIES:
            return "other"
        self._families.add(name)
        return name

    def emit(self, gauges: Mapping[Metric, float]) -> None:
        """Send the gauges and what is new, if it is time or no sequence is running."""
        if self._draft_model_up and not gauges.get(DRAFT_MODEL):
            # The control group is compared with sequences that it drafted for.
            self._holdback.reset()
        self._draft_model_up = bool(gauges.get(DRAFT_MODEL))
        now = self._clock()
        if gauges[LIVE] and now < self._last_sent + _INTERVAL:
            return
        self._last_sent = now
        for gauge, number in gauges.items():
            self._observe(gauge, float(number))
        speedup = self._holdback.speedup()
        for bound, number in speedup._asdict().items() if speedup else ():
            self._observe(HOLDBACK, number, bound)
        samples = [*((*key, value) for key, value in self._counts.items()), *self._observed]
        self._counts.clear()
        self._observed.clear()
        for sample in samples:
            self._send(*sample)

    def _count(self, metric: Metric, value: float, *labels: str) -> None:
        self._counts[metric, (*self._served, *labels)] += value

    def _observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._observed.append((metric, (*self._served, *labels), value))
