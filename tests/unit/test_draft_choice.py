"""The choice between two variants of a draft: the replay, the measurement on tiny models, and its cache."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from costs import flat, proportional, stairs, table
from specserve.config import load_yaml
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ConfigError, ModelLoadError
from specserve.speculation.cost import Cost
from specserve.tools import draft_choice, paths
from specserve.tools.draft_choice import Observed, fastest, replay_seconds
from specserve.tools.models import prepare
from tiny_models import write_tiny

ONE = Cost(table(lambda rows: 1.0 * rows), most=32)
PROSE = [True, False, False, True, True, False, False, True, False, False]
CODE = [True, True, True, False, True, True, True, True, True, True]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, empty."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return paths.models_directory()


def step_by_step(matches: list[bool], gamma: int, draft: list[float], target: list[float]) -> float:
    """The same replay, one token at a time."""
    left, spent, all_accepted = len(matches), 0.0, False
    while left:
        drafts = min(gamma, left - 1)
        for number in range(drafts):
            spent += draft[2 if number == 0 and all_accepted else 1]
        spent += target[drafts + 1]
        all_accepted = True
        for _ in range(drafts):
            left -= 1
            if not matches[-left - 1]:
                all_accepted = False
                break
        else:
            left -= 1
    return spent


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5])
def test_a_replay_costs_as_much_as_its_rounds(gamma: int) -> None:
    draft, target = [0.0, 0.3, 0.45, 0.5, 0.5], [0.0, 1.0, 1.4, 1.6, 1.7, 2.4, 2.9]
    costs = [Cost(table(prices.__getitem__, most=len(prices) - 1), most=32) for prices in (draft, target)]
    for matches in product([False, True], repeat=7):
        expected = step_by_step(list(matches), gamma, draft, target)
        assert replay_seconds(matches, gamma, *costs) == pytest.approx(expected)


def test_without_drafts_every_token_is_a_pass() -> None:
    assert replay_seconds(PROSE, 0, ONE, stairs()) == len(PROSE)


def test_a_pass_of_the_target_is_padded_if_that_is_cheaper() -> None:
    target = Cost(table([0, 1.0, 1.9, 2.6, 1.7].__getitem__, most=4), most=32)
    # A round of two drafts, both accepted, is three rows that run as four.
    assert replay_seconds([True, True, True], 2, flat(0.1), target) == pytest.approx(0.2 + 1.7, abs=1e-4)


@pytest.mark.parametrize("target", [flat(), stairs(), proportional()], ids=["flat", "stairs", "proportional"])
def test_the_best_number_of_drafts_is_the_one_that_takes_the_least(target: Cost) -> None:
    observed = Observed([CODE, PROSE], flat(0.2))
    speeds = {
        gamma: 20
        / (replay_seconds(CODE, gamma, observed.cost, target) + replay_seconds(PROSE, gamma, observed.cost, target))
        for gamma in range(1, 9)
    }
    found = fastest(observed, target, 8)
    assert found.tokens_per_second == pytest.approx(max(speeds.values()))
    assert found.tokens_per_second == pytest.approx(speeds[found.gamma])


def test_a_draft_that_is_more_often_right_or_cheaper_is_faster() -> None:
    slow, right = fastest(Observed([PROSE], flat(0.2)), stairs(), 8), fastest(Observed([CODE], flat(0.2)), stairs(), 8)
    assert fastest(Observed([PROSE], flat(0.1)), stairs(), 8) > slow
    assert right > slow
    assert right.gamma > slow.gamma


def written(path: Path, role: str) -> Path:
    write_tiny(path, "qwen2", role)
    return path


def configuration(directory: Path, **handler: Any) -> Path:
    """A pair of the operator's whose draft has `requantise: best`."""
    directory.mkdir(exist_ok=True)
    for role in ("target", "draft"):
        if not (directory / f"{role}.gguf").exists():
            write_tiny(directory / f"{role}.gguf", "qwen2", role)
    document = {
        "handler": {
            "model_id": "m",
            "target": {"path": "target.gguf"},
            "draft": {"path": "draft.gguf", "requantise": "best"},
            "threads": 1,
            **handler,
        }
    }
    (directory / "model.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return directory / "model.yaml"


def observed(cheap: Literal["as published", "as pure Q4_0"], step: float = 0.01) -> Any:
    """A replacement of `_observe` that finds one variant twice as fast as the other; `step` in seconds."""

    def observe(_target: Path, variants: dict[str, Path], _threads: int) -> tuple[Cost, dict[str, Observed]]:
        return stairs(0.1), {form: Observed([CODE], flat(step if form == cheap else 2 * step)) for form in variants}

    return observe


@pytest.mark.parametrize("cheap", ["as published", "as pure Q4_0"])
def test_the_faster_variant_is_chosen_and_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cheap: Literal["as published", "as pure Q4_0"],
) -> None:
    monkeypatch.setattr(draft_choice, "_observe", observed(cheap))
    draft = prepare(configuration(tmp_path / "own")).draft
    assert draft is not None
    assert draft.name == "draft.gguf" if cheap == "as published" else draft.name.endswith(".pure-q4_0.gguf")
    fast, slow = (fastest(Observed([CODE], flat(cost)), stairs(0.1), 15).tokens_per_second for cost in (0.01, 0.02))
    other = "as pure Q4_0" if cheap == "as published" else "as published"
    assert capsys.readouterr().out == (
        f"The draft is {draft.name}: {fast:.1f} tokens/s with this target, {other} {slow:.1f}, without a draft 10.0.\n"
    )


def test_a_draft_slower_than_plain_decoding_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_choice, "_observe", observed("as published", step=1.0))
    prepare(configuration(tmp_path / "own"))
    assert "With `mode: auto` a draft that does not pay is rarely used." in capsys.readouterr().out


def test_the_measurement_is_cached_until_something_changes(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    measured = draft_choice._observe

    def observe(target: Path, variants: dict[str, Path], threads: int) -> tuple[Cost, dict[str, Observed]]:
        seen.append(target)
        return measured(target, variants, threads)

    monkeypatch.setattr(draft_choice, "_observe", observe)
    own = tmp_path / "own"
    config = configuration(own)
    first = prepare(config)
    said = capsys.readouterr().out
    assert first.draft is not None
    assert f"The draft is {first.draft.name}: " in said
    [cache] = directory.glob(".draft.gguf.best-*.json")
    result = json.loads(cache.read_text())
    assert set(result["variants"]) == {"as published", "as pure Q4_0"}
    for variant in result["variants"].values():
        assert 0.3 < variant["match_rate"] < 1
        assert variant["tokens_per_second"] > 0

    assert prepare(config) == first
    assert capsys.readouterr().out == f"{said.rstrip()} (Measured before.)\n"
    assert len(seen) == 1

    (own / "draft.gguf").unlink()
    written(own / "draft.gguf", "target")
    prepare(config)
    assert len(seen) == 2
    assert json.loads(cache.read_text())["variants"]["as published"]["match_rate"] > 0.95
    (own / "target.gguf").unlink()
    written(own / "target.gguf", "draft")
    prepare(config)
    assert len(seen) == 3
    config = configuration(own, speculation={"max_gamma": 4})
    prepare(config)
    assert len(seen) == 4
    monkeypatch.setattr(draft_choice, "version", lambda _package: "another")
    prepare(config)
    assert len(seen) == 5
    cache.write_text("{", encoding="utf-8")
    prepare(config)
    assert len(seen) == 6
    assert len(list(directory.glob(".draft.gguf.best-*.json"))) == 1


def test_matches_are_where_the_drafts_argmax_is_the_targets(tmp_path: Path) -> None:
    target, draft = (
        LlamaModel(written(tmp_path / "t.gguf", "target")),
        LlamaModel(written(tmp_path / "d.gguf", "draft")),
    )
    shape: dict[str, Any] = {"n_slots": 1, "context_length": 512, "threads": 1, "max_rows": 64}
    writer, reader = LlamaEngine(target, max_logits=1, **shape), LlamaEngine(draft, max_logits=4, **shape)
    prompt = target.encode(draft_choice.PROMPTS[0])
    answer = draft_choice.greedy_answer(writer, target, prompt)
    assert 1 < len(answer) <= 40
    assert draft_choice.argmax_matches(writer, prompt, answer, target.size) == [True] * len(answer)
    matches = draft_choice.argmax_matches(reader, prompt, answer, target.size)
    reader.truncate(0, 0)
    text = [*prompt, *answer]
    rows = [Row(token, 0, i, wants_logits=True) for i, token in enumerate(text)]
    choices = [int(np.argmax(reader.forward([row])[0])) for row in rows]
    assert matches == [choice == token for choice, token in zip(choices[len(prompt) - 1 :], answer, strict=False)]
    assert True in matches
    assert False in matches


def test_a_draft_of_another_family_is_refused(tmp_path: Path, directory: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    written(own / "draft.gguf", "other")
    with pytest.raises(ModelLoadError, match=r"The draft draft\.gguf does not fit the target target\.gguf"):
        prepare(configuration(own))
    assert not list(directory.glob(".draft.gguf.best-*.json"))


def test_a_failed_pass_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_choice, "KV_LEN", 1000)
    with pytest.raises(ModelLoadError, match=r"target\.gguf: cannot be measured: llama_decode failed"):
        prepare(configuration(tmp_path / "own"))


def test_a_target_is_not_chosen_by_its_speed(tmp_path: Path) -> None:
    config = configuration(tmp_path / "own", target={"path": "target.gguf", "requantise": "best"})
    with pytest.raises(ConfigError, match=r"`handler\.target`: .*`requantise: best` is for a draft, since another"):
        load_yaml(config)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path / "own", draft={"path": "draft.gguf", "requantise": "q5_0"})
    with pytest.raises(ConfigError, match=r"`handler\.draft\.requantise`: Input should be 'q4_0' or 'best'"):
        load_yaml(config)
