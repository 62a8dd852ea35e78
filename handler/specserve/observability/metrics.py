"""Counters, gauges and histograms for Prometheus, collected here and sent every few seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from specserve.observability.control_group import Holdback
from specserve.observability.records import EndRecord
from specserve.speculation.step import Step

Kind = Literal["counter", "gauge", "histogram"]
# Prompt families come from clients: this many have a label of their own, the others share `other`.
_MAX_FAMILIES = 20
# Rounds without drafts after which speculation counts as paused for a sequence.
_PAUSE_ROUNDS = 8
# Seconds between two emissions while sequences are running; with none, metrics are sent at once.
_INTERVAL = 2.0


class Metric(NamedTuple):
    """A metric's kind, name and label names."""

    kind: Kind
    name: str
    labels: tuple[str, ...]


class Served(NamedTuple):
    """The model's name and version in TorchServe: the first labels of every metric."""

    model: str
    version: str


class Sample(NamedTuple):
    """A value to add to a counter, to set a gauge to, or to observe in a histogram."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def _metric(kind: Kind, name: str, *labels: str) -> Metric:
    """A metric with these labels after those of `Served`."""
    return Metric(kind, name, (*Served._fields, *labels))


ROUNDS = _metric("counter", "specserve_rounds_total", "family", "drafter")
GAMMA = _metric("counter", "specserve_gamma", "family", "gamma")
DRAFTED = _metric("counter", "specserve_draft_tokens_total", "family", "drafter")
ACCEPTED = _metric("counter", "specserve_accepted_tokens_total", "family", "drafter", "position")
ALTERNATIVES = _metric("counter", "specserve_alternative_tokens_total", "family")
ADOPTED = _metric("counter", "specserve_adopted_alternatives_total", "family")
EMITTED = _metric("counter", "specserve_emitted_tokens_total", "family", "group")
PROMPT = _metric("counter", "specserve_prompt_tokens_total", "family")
CACHED = _metric("counter", "specserve_prefix_cached_tokens_total", "family")
PREEMPTED = _metric("counter", "specserve_preemptions_total", "family")
SEQUENCES = _metric("counter", "specserve_texts_total", "family", "group", "reason")
DRAFT_SECONDS = _metric("counter", "specserve_draft_seconds_total", "family")
TARGET_SECONDS = _metric("counter", "specserve_target_seconds_total", "family")
OTHER_SECONDS = _metric("counter", "specserve_other_seconds_total", "family")
PAUSED = _metric("counter", "specserve_speculation_paused_total", "family")
RESUMED = _metric("counter", "specserve_speculation_resumed_total", "family")
TTFT = _metric("histogram", "specserve_time_to_first_token_seconds", "family", "group")
TPOT = _metric("histogram", "specserve_time_per_output_token_seconds", "family", "group")
WAIT = _metric("histogram", "specserve_wait_seconds", "family")
LIVE = _metric("gauge", "specserve_live_sequences")
WAITING = _metric("gauge", "specserve_waiting_sequences")
SLOTS = _metric("gauge", "specserve_slots")
CELLS = _metric("gauge", "specserve_cache_tokens")
RUNNING_CELLS = _metric("gauge", "specserve_cache_running_tokens")
KEPT_CELLS = _metric("gauge", "specserve_cache_kept_tokens")
OWN_KERNELS = _metric("gauge", "specserve_own_kernels")
THREADS = _metric("gauge", "specserve_compute_threads")
DRAFT_MODEL = _metric("gauge", "specserve_draft_model_up")
HOLDBACK = _metric("gauge", "specserve_holdback_speedup", "bound")
_GAUGES = (LIVE, WAITING, SLOTS, CELLS, RUNNING_CELLS, KEPT_CELLS, OWN_KERNELS, THREADS, DRAFT_MODEL)
ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class Gauges(NamedTuple):
    """A server's state.

    `cells` is the number of tokens that the target's KV cache holds at most, `running_cells` of those that it holds for
    running sequences, `kept_cells` of the others, which are kept for prompts that begin alike. `threads` is the number
    of compute threads now, `draft_model` whether the draft model works, None without one.
    """

    live: int
    waiting: int
    slots: int
    cells: int
    running_cells: int
    kept_cells: int
    own_kernels: bool
    threads: int
    draft_model: bool | None


class Metrics:
    """An observer that counts, and sends what it has counted.

    Args:
        served: the first labels of every sample.
        holdback: told the TPOT of sequences that may be compared; it begins anew when the draft model has failed.
        send: given every sample; None sends none.
        clock: seconds.
    """

    def __init__(
        self, served: Served, holdback: Holdback, send: Callable[[Sample], None] | None, clock: Callable[[], float]
    ) -> None:
        self._served = served
        self._holdback = holdback
        self._send = send
        self._clock = clock
        self._last_sent = -_INTERVAL
        self._draft_model: bool | None = None
        self._families: set[str] = set()
        self._counts: defaultdict[tuple[Metric, tuple[str, ...]], float] = defaultdict(float)
        self._observed: list[Sample] = []
        # By request and choice, how many of a sequence's last rounds had no drafts.
        self._rounds_without_drafts: dict[tuple[str, int], int] = {}

    def round(self, step: Step) -> None:
        """Count a round's time and tokens, and its drafts if it decoded."""
        info = step.sequence.info
        family = self.family(info.family)
        self._count(DRAFT_SECONDS, step.seconds.draft, family)
        self._count(TARGET_SECONDS, step.seconds.target, family)
        self._count(OTHER_SECONDS, step.seconds.other, family)
        self._count(EMITTED, len(step.emitted), family, info.group)
        if not step.is_decode_round:
            return
        drafters, accepted = step.drafted_by, step.accepted
        self._count(ROUNDS, 1, family, drafters[0] if drafters else "none")
        self._count(GAMMA, 1, family, str(len(drafters)))
        for index, drafter in enumerate(drafters):
            self._count(DRAFTED, 1, family, drafter)
            if index < accepted:
                self._count(ACCEPTED, 1, family, drafter, str(index + 1))
        self._count(ALTERNATIVES, len(step.alternatives), family)
        self._count(ADOPTED, step.adopted, family)
        if info.group == "auto":
            self._count_pauses(step, family)

    def _count_pauses(self, step: Step, family: str) -> None:
        """Count a pause after some rounds without drafts, and its end with the next drafts."""
        key = step.sequence.info.request, step.sequence.index
        without = self._rounds_without_drafts.get(key, 0)
        if step.drafts:
            if without >= _PAUSE_ROUNDS:
                self._count(RESUMED, 1, family)
            self._rounds_without_drafts[key] = 0
        else:
            if without == _PAUSE_ROUNDS - 1:
                self._count(PAUSED, 1, family)
            self._rounds_without_drafts[key] = without + 1

    def end(self, record: EndRecord) -> None:
        """Count a sequence and its times."""
        family, group = self.family(record.info.family), record.info.group
        self._rounds_without_drafts.pop((record.info.request, record.choice), None)
        self._count(SEQUENCES, 1, family, group, record.reason)
        self._count(PROMPT, record.prompt_tokens, family)
        self._count(CACHED, record.cached_tokens, family)
        self._count(PREEMPTED, record.preemptions, family)
        # Prometheus sees the first increase only of a counter that was there before.
        self._count(PAUSED, 0, family)
        self._count(RESUMED, 0, family)
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
        if name not in self._families:
            if len(self._families) >= _MAX_FAMILIES:
                return "other"
            self._families.add(name)
        return name

    def emit(self, gauges: Gauges) -> None:
        """Send what is new, if it is time or no sequence is running."""
        if self._draft_model and not gauges.draft_model:
            # The control group is compared with sequences that it drafted for.
            self._holdback.reset()
        self._draft_model = gauges.draft_model
        now = self._clock()
        if gauges.live and now < self._last_sent + _INTERVAL:
            return
        self._last_sent = now
        for sample in self._take(gauges):
            if self._send:
                self._send(sample)

    def _take(self, gauges: Gauges) -> Iterator[Sample]:
        counts, observed = self._counts, self._observed
        self._counts, self._observed = defaultdict(float), []
        for (metric, labels), value in counts.items():
            yield Sample(metric, labels, value)
        yield from observed
        for gauge, number in zip(_GAUGES, gauges, strict=True):
            if number is not None:
                yield Sample(gauge, tuple(self._served), int(number))
        speedup = self._holdback.speedup()
        for bound, value in speedup._asdict().items() if speedup else ():
            yield Sample(HOLDBACK, (*self._served, bound), value)

    def _count(self, metric: Metric, value: float, *labels: str) -> None:
        self._counts[metric, (*self._served, *labels)] += value

    def _observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._observed.append(Sample(metric, (*self._served, *labels), value))
