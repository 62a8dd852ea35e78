"""Counters, gauges and histograms for Prometheus, gathered here and handed on every few seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from specserve.observability.control_group import Holdback, PlainRounds
from specserve.observability.records import End, Origin, Round

Kind = Literal["counter", "gauge", "histogram"]
# Families come from clients: so many have a label of their own, and the others share one.
_MOST_FAMILIES = 20
# A text that went without drafts for so many rounds is one where speculation was switched off.
_PAUSE = 8


class Metric(NamedTuple):
    """What is counted: its name, and those of its labels."""

    kind: Kind
    name: str
    labels: tuple[str, ...]


class Served(NamedTuple):
    """What a server is to TorchServe; the first labels of every metric, so that a canary is told from its elder."""

    model: str
    version: str


class Sample(NamedTuple):
    """A value to add to a counter, to set a gauge to, or to sort into a histogram."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def _of_server(kind: Kind, name: str, *labels: str) -> Metric:
    """A metric with these labels behind those of its server."""
    return Metric(kind, name, (*Served._fields, *labels))


ROUNDS = _of_server("counter", "specserve_rounds_total", "family", "drafter")
GAMMA = _of_server("counter", "specserve_gamma", "family", "gamma")
DRAFTED = _of_server("counter", "specserve_draft_tokens_total", "family", "drafter")
ACCEPTED = _of_server("counter", "specserve_accepted_tokens_total", "family", "drafter", "position")
EMITTED = _of_server("counter", "specserve_emitted_tokens_total", "family", "group")
PROMPT = _of_server("counter", "specserve_prompt_tokens_total", "family")
CACHED = _of_server("counter", "specserve_prefix_cached_tokens_total", "family")
TEXTS = _of_server("counter", "specserve_texts_total", "family", "group", "reason")
DRAFTING = _of_server("counter", "specserve_draft_seconds_total", "family")
VERIFYING = _of_server("counter", "specserve_target_seconds_total", "family")
ELSEWHERE = _of_server("counter", "specserve_other_seconds_total", "family")
PAUSED = _of_server("counter", "specserve_speculation_paused_total", "family")
RESUMED = _of_server("counter", "specserve_speculation_resumed_total", "family")
FIRST = _of_server("histogram", "specserve_time_to_first_token_seconds", "family", "group")
PACE = _of_server("histogram", "specserve_time_per_output_token_seconds", "family", "group")
WAIT = _of_server("histogram", "specserve_wait_seconds", "family")
LIVE = _of_server("gauge", "specserve_live_sequences")
WAITING = _of_server("gauge", "specserve_waiting_sequences")
SLOTS = _of_server("gauge", "specserve_slots")
DRAFT_MODEL = _of_server("gauge", "specserve_draft_model_up")
OWN_KERNELS = _of_server("gauge", "specserve_own_kernels")
HELD_BACK = _of_server("gauge", "specserve_holdback_speedup", "bound")
PLAIN = _of_server("gauge", "specserve_plain_rounds_speedup", "bound")
ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class Now(NamedTuple):
    """How a server is at a moment: live and waiting sequences, slots, kernels, and whether its draft model works."""

    live: int
    waiting: int
    slots: int
    own_kernels: bool
    draft_model: bool | None


class Metrics:
    """An observer that counts.

    Args:
        served: the labels of all.
        holdback: told how fast texts were.
        plain_rounds: asked what speculation brings, as `holdback` is.
    """

    def __init__(self, served: Served, holdback: Holdback, plain_rounds: PlainRounds) -> None:
        self._served = served
        self._holdback = holdback
        self._plain_rounds = plain_rounds
        self._families: set[str] = set()
        self._counts: defaultdict[tuple[Metric, tuple[str, ...]], float] = defaultdict(float)
        self._seen: list[Sample] = []
        # By text, how many of its last rounds had no drafts.
        self._undrafted: dict[Origin, int] = {}

    def round(self, record: Round) -> None:
        """Count a round's time, and of one that decodes its drafts; reading a prompt is no decision about drafts."""
        family = self.family(record.origin.family)
        for metric, seconds in ((DRAFTING, record.draft), (VERIFYING, record.target), (ELSEWHERE, record.other)):
            self._count(metric, seconds, family)
        self._count(EMITTED, len(record.tokens), family, record.origin.group)
        if not record.place:
            return
        drafts = record.drafts
        self._count(ROUNDS, 1, family, drafts[0] if drafts else "none")
        self._count(GAMMA, 1, family, str(len(drafts)))
        for place, drafter in enumerate(drafts):
            self._count(DRAFTED, 1, family, drafter)
            if place < record.accepted:
                self._count(ACCEPTED, 1, family, drafter, str(place + 1))
        if record.origin.group == "auto":
            self._count_pauses(record, family)

    def _count_pauses(self, record: Round, family: str) -> None:
        """Speculation is switched off for a text that goes without drafts for a while, and on with its next ones."""
        plain = self._undrafted.get(record.origin, 0)
        if record.drafts:
            if plain >= _PAUSE:
                self._count(RESUMED, 1, family)
            self._undrafted[record.origin] = 0
        else:
            if plain == _PAUSE - 1:
                self._count(PAUSED, 1, family)
            self._undrafted[record.origin] = plain + 1

    def end(self, record: End) -> None:
        """Count a text, and how long its client waited."""
        family, group = self.family(record.origin.family), record.origin.group
        self._undrafted.pop(record.origin, None)
        self._count(TEXTS, 1, family, group, record.reason)
        self._count(PROMPT, record.prompt_tokens, family)
        self._count(CACHED, record.cached_tokens, family)
        # A counter that is there from the start shows its first increase.
        self._count(PAUSED, 0, family)
        self._count(RESUMED, 0, family)
        self._see(WAIT, record.waited, family)
        if record.first is not None:
            self._see(FIRST, record.first, family, group)
        if record.pace is not None:
            self._see(PACE, record.pace, family, group)
            # The lot falls once for a request, so the first of its texts stands for it.
            if record.origin.drawn and record.origin.choice == 0:
                self._holdback.learn(record.pace, plain=group == "holdback")

    def family(self, named: str) -> str:
        """The label for a kind of prompt, however many clients name."""
        if named in {"", "other"}:
            return named or "none"
        if named not in self._families:
            if len(self._families) >= _MOST_FAMILIES:
                return "other"
            self._families.add(named)
        return named

    def take(self, now: Now) -> Iterator[Sample]:
        """All that is new since the last time."""
        counts, seen = self._counts, self._seen
        self._counts, self._seen = defaultdict(float), []
        for (metric, labels), value in counts.items():
            yield Sample(metric, labels, value)
        yield from seen
        for gauge, number in zip((LIVE, WAITING, SLOTS, OWN_KERNELS, DRAFT_MODEL), now, strict=True):
            if number is not None:
                yield Sample(gauge, tuple(self._served), int(number))
        for gauge, speedup in ((HELD_BACK, self._holdback.speedup()), (PLAIN, self._plain_rounds.speedup())):
            for bound, value in speedup._asdict().items() if speedup else ():
                yield Sample(gauge, (*self._served, bound), value)

    def _count(self, metric: Metric, value: float, *labels: str) -> None:
        self._counts[metric, (*self._served, *labels)] += value

    def _see(self, metric: Metric, value: float, *labels: str) -> None:
        self._seen.append(Sample(metric, (*self._served, *labels), value))


class Emitter:
    """Hands samples on, not more often than every so many seconds while there is work.

    Args:
        metrics: where they are gathered.
        send: told of each.
        clock: seconds.
        every: seconds between two emissions.
    """

    def __init__(
        self, metrics: Metrics, send: Callable[[Sample], None], clock: Callable[[], float], every: float
    ) -> None:
        self._metrics = metrics
        self._send = send
        self._clock = clock
        self._every = every
        self._last = -every

    def emit(self, now: Now) -> None:
        """Hand on what is new, if it is time, or if nothing will come for a while."""
        moment = self._clock()
        if now.live and moment < self._last + self._every:
            return
        self._last = moment
        for sample in self._metrics.take(now):
            self._send(sample)
