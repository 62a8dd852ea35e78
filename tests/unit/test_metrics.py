"""The samples that metrics emit for Prometheus."""

from __future__ import annotations

from collections import defaultdict

import pytest

from specserve.observability.control_group import Holdback
from specserve.observability.metrics import ALL, Gauges, Metrics, Sample, Served
from specserve.observability.records import EndRecord, family_label
from specserve.sequence import DrafterName, Group, RequestInfo
from specserve.speculation.step import Step
from steps import finished_step

SERVED = Served("qwen", "1.1")
GAUGES = Gauges(
    live=2,
    waiting=1,
    slots=8,
    cells=900,
    running_cells=500,
    kept_cells=300,
    own_kernels=True,
    threads=2,
    draft_model=True,
)


def info(group: Group = "auto", *, randomised: bool = True) -> RequestInfo:
    return RequestInfo("r", "code", group, randomised)


def a_round(drafts: list[DrafterName], accepted: int, group: Group = "auto") -> Step:
    return finished_step(info(group), drafts, accepted, [7] * (accepted + 1))


def an_end(request: RequestInfo | None = None, tpot: float | None = 0.1, choice: int = 0) -> EndRecord:
    return EndRecord(request or info(), choice, "stop", 40, 30, 20, 2, waited=0.5, ttft=1.5, tpot=tpot)


class RecordingMetrics(Metrics):
    """Metrics that record the samples they emit."""

    def __init__(self, holdback: Holdback) -> None:
        self.samples: list[Sample] = []
        self.now = 0.0
        super().__init__(SERVED, holdback, self.samples.append, lambda: self.now)


def emitted(metrics: RecordingMetrics) -> defaultdict[tuple[str, ...], float]:
    """Newly emitted values by name and labels, without the labels model and version."""
    metrics.now += 10
    metrics.samples.clear()
    metrics.emit(GAUGES)
    values: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for metric, (model, version, *labels), value in metrics.samples:
        assert (model, version) == ("qwen", "1.1")
        assert len(labels) + 2 == len(metric.labels)
        values[metric.name, *labels] += value
    return values


@pytest.fixture
def metrics() -> RecordingMetrics:
    return RecordingMetrics(Holdback(0.1))


def test_round_counts_its_drafts_by_drafter_and_position(metrics: RecordingMetrics) -> None:
    metrics.round(a_round(["lookup", "model", "model"], 2))
    metrics.round(a_round([], 0))
    values = emitted(metrics)
    assert values["specserve_draft_tokens_total", "code", "lookup"] == 1
    assert values["specserve_draft_tokens_total", "code", "model"] == 2
    assert values["specserve_accepted_tokens_total", "code", "lookup", "1"] == 1
    assert values["specserve_accepted_tokens_total", "code", "model", "2"] == 1
    assert values["specserve_accepted_tokens_total", "code", "model", "3"] == 0
    assert values["specserve_emitted_tokens_total", "code", "auto"] == 4
    assert values["specserve_rounds_total", "code", "lookup"] == 1
    assert values["specserve_rounds_total", "code", "none"] == 1
    assert values["specserve_gamma", "code", "3"] == values["specserve_gamma", "code", "0"] == 1
    assert values["specserve_draft_seconds_total", "code"] == pytest.approx(0.2)
    assert values["specserve_target_seconds_total", "code"] == pytest.approx(0.4)


def test_prefill_and_deferred_rounds_count_time_and_no_drafts(metrics: RecordingMetrics) -> None:
    metrics.round(finished_step(info(), position=0, seconds=(0.0, 0.3, 0.01)))
    metrics.round(finished_step(info(), tokens=[7], position=0, seconds=(0.0, 0.2, 0.01)))
    for _ in range(20):
        metrics.round(finished_step(info(), seconds=(0.0, 0.1, 0.01)))
    values = emitted(metrics)
    assert values["specserve_target_seconds_total", "code"] == pytest.approx(2.5)
    assert not values.get(("specserve_speculation_paused_total", "code"))
    assert values["specserve_emitted_tokens_total", "code", "auto"] == 1
    assert not [name for name, *_ in values if name in {"specserve_rounds_total", "specserve_gamma"}]


def test_counts_are_emitted_once(metrics: RecordingMetrics) -> None:
    metrics.round(a_round(["model"], 1))
    emitted(metrics)
    emitted(metrics)
    assert not [sample for sample in metrics.samples if sample.metric.kind != "gauge" and sample.value]


def test_end_of_a_sequence_counts_its_latencies(metrics: RecordingMetrics) -> None:
    metrics.end(an_end())
    values = emitted(metrics)
    assert values["specserve_texts_total", "code", "auto", "stop"] == 1
    assert values["specserve_prefix_cached_tokens_total", "code"] == 30
    assert values["specserve_preemptions_total", "code"] == 2
    assert values["specserve_wait_seconds", "code"] == 0.5
    assert values["specserve_time_to_first_token_seconds", "code", "auto"] == 1.5
    assert values["specserve_time_per_output_token_seconds", "code", "auto"] == 0.1


def test_gauges_are_emitted_every_time(metrics: RecordingMetrics) -> None:
    values = emitted(metrics)
    assert values["specserve_live_sequences",] == 2
    assert values["specserve_waiting_sequences",] == 1
    assert values["specserve_slots",] == 8
    assert values["specserve_cache_tokens",] == 900
    assert values["specserve_cache_running_tokens",] == 500
    assert values["specserve_cache_kept_tokens",] == 300
    assert values["specserve_draft_model_up",] == 1
    assert values["specserve_own_kernels",] == 1
    assert values["specserve_compute_threads",] == 2


def test_pause_and_resume_of_speculation_are_counted_once(metrics: RecordingMetrics) -> None:
    model: list[DrafterName] = ["model"]
    for drafts in [model] + [[]] * 20 + [model] * 3:
        metrics.round(a_round(drafts, 0))
    values = emitted(metrics)
    assert values["specserve_speculation_paused_total", "code"] == 1
    assert values["specserve_speculation_resumed_total", "code"] == 1


@pytest.mark.parametrize("group", ["off", "fixed", "holdback"])
def test_pauses_are_counted_for_adaptive_sequences_only(metrics: RecordingMetrics, group: Group) -> None:
    for _ in range(20):
        metrics.round(a_round([], 0, group))
    assert emitted(metrics)["specserve_speculation_paused_total", "code"] == 0


@pytest.mark.parametrize(
    ("name", "label"),
    [("code", "code"), ("", "none"), ("Code|x:1", "other"), ("a" * 33, "other"), ("naïve", "other"), ("a\nb", "other")],
)
def test_family_label_is_a_short_plain_word_or_other(metrics: RecordingMetrics, name: str, label: str) -> None:
    assert metrics.family(family_label(name)) == label


def test_number_of_family_labels_is_bounded(metrics: RecordingMetrics) -> None:
    labels = {metrics.family(f"family-{number}") for number in range(1000)}
    assert len(labels) == 21
    assert metrics.family("family-0") == "family-0"


def test_speedup_is_that_of_randomised_requests_over_the_control_group() -> None:
    holdback = Holdback(0.1)
    metrics = RecordingMetrics(holdback)
    for number in range(40):
        metrics.end(an_end(info("holdback"), tpot=0.2 + number / 1000))
        metrics.end(an_end(tpot=0.1 + number / 1000))
        metrics.end(an_end(info("off", randomised=False), tpot=9.0))
        metrics.end(an_end(info(randomised=False), tpot=9.0))
        metrics.end(an_end(info("holdback"), choice=1, tpot=0.001))
    values = emitted(metrics)
    low, value, high = (values["specserve_holdback_speedup", bound] for bound in ("low", "value", "high"))
    assert low < value < high
    assert value == pytest.approx(2, rel=0.15)


def test_the_comparison_begins_anew_when_the_draft_model_has_failed() -> None:
    metrics = RecordingMetrics(Holdback(0.1))
    for number in range(40):
        metrics.end(an_end(info("holdback"), tpot=0.2 + number / 1000))
        metrics.end(an_end(tpot=0.1 + number / 1000))
    assert ("specserve_holdback_speedup", "value") in emitted(metrics)
    metrics.samples.clear()
    metrics.now += 100
    metrics.emit(GAUGES._replace(draft_model=False))
    assert "specserve_holdback_speedup" not in {sample.metric.name for sample in metrics.samples}


def test_samples_are_emitted_at_intervals_and_when_idle(metrics: RecordingMetrics) -> None:
    def sends(live: int, now: float) -> bool:
        metrics.now = now
        metrics.samples.clear()
        metrics.emit(GAUGES._replace(live=live))
        return bool(metrics.samples)

    assert sends(live=1, now=0.0)
    assert not sends(live=1, now=1.9)
    assert sends(live=0, now=1.9)
    assert not sends(live=1, now=3.8)
    assert sends(live=1, now=4.0)


def test_metric_names_and_labels_are_valid_for_torchserve() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.name.replace("_", "").isalnum()
        assert metric.labels[0] == "model"
