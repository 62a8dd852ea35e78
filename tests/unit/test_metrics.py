"""What Prometheus is told."""

from __future__ import annotations

from collections import defaultdict

import pytest

from specserve.observability.control_group import Holdback, PlainRounds
from specserve.observability.metrics import ALL, Emitter, Metrics, Now, Sample, Served
from specserve.observability.records import End, Group, Origin, Round, plain_family

SERVED = Served("qwen", "1.1")
NOW = Now(live=2, waiting=1, slots=8, own_kernels=True, draft_model=True)


def origin(
    family: str = "code", group: Group = "auto", request: str = "r", *, choice: int = 0, drawn: bool = True
) -> Origin:
    return Origin(request, choice, family, group, drawn)


def a_round(drafts: list[str], accepted: int, whose: Origin | None = None) -> Round:
    return Round(whose or origin(), 1, 50, drafts, accepted, [7] * (accepted + 1), 0.1, 0.2, 0.01, 1)


def an_end(whose: Origin | None = None, pace: float | None = 0.1) -> End:
    return End(whose or origin(), "stop", 40, 30, 20, waited=0.5, first=1.5, pace=pace)


def taken(metrics: Metrics) -> defaultdict[tuple[str, ...], float]:
    """Values by name and labels, those of all left out; they come first."""
    values: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for metric, (model, version, *labels), value in metrics.take(NOW):
        assert (model, version) == ("qwen", "1.1")
        assert len(labels) + 2 == len(metric.labels)
        values[metric.name, *labels] += value
    return values


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(SERVED, Holdback(0.1), PlainRounds(0.1))


def test_a_round_counts_its_drafts_by_drafter_and_place(metrics: Metrics) -> None:
    metrics.round(a_round(["lookup", "model", "model"], 2))
    metrics.round(a_round([], 0))
    values = taken(metrics)
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


def test_reading_a_prompt_takes_time_and_is_no_decision_about_drafts(metrics: Metrics) -> None:
    metrics.round(Round(origin(), 0, 0, [], 0, [], 0.0, 0.3, 0.01, 1))
    metrics.round(Round(origin(), 0, 64, [], 0, [7], 0.0, 0.2, 0.01, 1))
    values = taken(metrics)
    assert values["specserve_target_seconds_total", "code"] == pytest.approx(0.5)
    assert values["specserve_emitted_tokens_total", "code", "auto"] == 1
    assert not [name for name, *_ in values if name in {"specserve_rounds_total", "specserve_gamma"}]


def test_what_was_taken_is_not_counted_again(metrics: Metrics) -> None:
    metrics.round(a_round(["model"], 1))
    taken(metrics)
    assert all(
        name.startswith(
            ("specserve_live", "specserve_waiting", "specserve_slots", "specserve_own", "specserve_draft_model")
        )
        for name, *_ in taken(metrics)
    )


def test_an_end_says_how_long_its_client_waited(metrics: Metrics) -> None:
    metrics.end(an_end())
    values = taken(metrics)
    assert values["specserve_texts_total", "code", "auto", "stop"] == 1
    assert values["specserve_prefix_cached_tokens_total", "code"] == 30
    assert values["specserve_wait_seconds", "code"] == 0.5
    assert values["specserve_time_to_first_token_seconds", "code", "auto"] == 1.5
    assert values["specserve_time_per_output_token_seconds", "code", "auto"] == 0.1


def test_gauges_are_told_every_time(metrics: Metrics) -> None:
    values = taken(metrics)
    assert values["specserve_live_sequences",] == 2
    assert values["specserve_waiting_sequences",] == 1
    assert values["specserve_slots",] == 8
    assert values["specserve_draft_model_up",] == 1
    assert values["specserve_own_kernels",] == 1


def test_a_text_that_goes_without_drafts_for_a_while_is_paused_once_and_resumed_once(metrics: Metrics) -> None:
    for drafts in [["model"]] + [[]] * 20 + [["model"]] * 3:
        metrics.round(a_round(drafts, 0))
    values = taken(metrics)
    assert values["specserve_speculation_paused_total", "code"] == 1
    assert values["specserve_speculation_resumed_total", "code"] == 1


@pytest.mark.parametrize("group", ["off", "fixed", "holdback"])
def test_only_the_controller_pauses(metrics: Metrics, group: Group) -> None:
    for _ in range(20):
        metrics.round(a_round([], 0, origin(group=group)))
    assert taken(metrics)["specserve_speculation_paused_total", "code"] == 0


@pytest.mark.parametrize(
    ("named", "label"),
    [("code", "code"), ("", "none"), ("Code|x:1", "other"), ("a" * 33, "other"), ("naïve", "other"), ("a\nb", "other")],
)
def test_a_family_is_a_short_plain_word_or_another(metrics: Metrics, named: str, label: str) -> None:
    assert metrics.family(plain_family(named)) == label


def test_clients_cannot_make_labels_without_end(metrics: Metrics) -> None:
    labels = {metrics.family(f"family-{number}") for number in range(1000)}
    assert len(labels) == 21
    assert metrics.family("family-0") == "family-0"


def test_the_control_group_makes_a_figure() -> None:
    holdback = Holdback(0.1)
    metrics = Metrics(SERVED, holdback, PlainRounds(0.1))
    for number in range(40):
        metrics.end(an_end(origin(group="holdback"), pace=0.2 + number / 1000))
        metrics.end(an_end(pace=0.1 + number / 1000))
        metrics.end(an_end(origin(group="off", drawn=False), pace=9.0))
        metrics.end(an_end(origin(drawn=False), pace=9.0))
        metrics.end(an_end(origin(group="holdback", choice=1), pace=0.001))
    values = taken(metrics)
    low, value, high = (values["specserve_holdback_speedup", bound] for bound in ("low", "value", "high"))
    assert low < value < high
    assert value == pytest.approx(2, rel=0.15)


def test_samples_go_out_now_and_then_and_when_the_work_ends(metrics: Metrics) -> None:
    now = 0.0
    sent: list[Sample] = []
    emitter = Emitter(metrics, sent.append, lambda: now, every=2.0)

    def told(live: int) -> bool:
        sent.clear()
        emitter.emit(NOW._replace(live=live))
        return bool(sent)

    assert told(live=1)
    now = 1.9
    assert not told(live=1)
    assert told(live=0)
    now = 4.0
    assert told(live=1)


def test_names_and_labels_are_ones_that_torchserve_can_carry() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.name.replace("_", "").isalnum()
        assert metric.labels[0] == "model"
