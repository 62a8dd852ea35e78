"""What the doctor says of a pair, and when it says that something should be done."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from costs import proportional
from specserve.engine.llama_model import LlamaModel
from specserve.tools import findings, paths
from specserve.tools.files import ModelFile, checked
from specserve.tools.findings import costs, forms, thread_count
from specserve.tools.prepare import Prepared, requantise
from tiny_models import write_tiny

PROJECT = Path(__file__).parents[2]
TOPICS = [
    *("machine", "kernels", "models", "repeating", "pair", "costs"),
    *("threads", "greedy", "sampling", "gain", "quantisation"),
]


def test_it_looks_at_everything() -> None:
    """What it finds of speeds is this moment's; all else is right with the tiny pair."""
    command = ["scripts/doctor", "--config", "config/tiny.yaml", "--json"]
    outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    found = {finding["topic"]: finding for finding in json.loads(outcome.stdout)["findings"]}
    assert list(found) == TOPICS
    assert outcome.returncode == (not all(finding["well"] for finding in found.values()))
    assert found["costs"]["facts"]["draft_share"] > 0
    assert all(found[topic]["well"] for topic in ("kernels", "models", "repeating", "pair", "greedy", "sampling"))
    assert found["greedy"]["facts"]["differing"] == 0
    assert found["sampling"]["facts"]["standard_deviations"].keys() == {"token", "block", "coupled"}
    assert set(found["quantisation"]["facts"]) == {"pure Q4_0", "published"}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target as it was fetched."""
    monkeypatch.setattr(paths, "models_directory", lambda: tmp_path)
    file = tmp_path / "published.gguf"
    write_tiny(file, "qwen2", "target")
    return file


def compared(
    monkeypatch: pytest.MonkeyPatch, served: Path, published: Path, took: tuple[float, float]
) -> tuple[bool, str]:
    """What is said where a row of the served form takes as many seconds as the first, one of the other the second."""
    monkeypatch.setattr(findings, "steps", lambda _engines: [(seconds, 3 * seconds) for seconds in took])
    found = forms(Prepared(served, None, published), 1)
    return found.well, found.sentence


def test_the_published_file_is_never_advised_against(monkeypatch: pytest.MonkeyPatch, published: Path) -> None:
    well, said = compared(monkeypatch, published, published, (0.03, 0.02))
    assert well
    assert "published 30 and 90, pure Q4_0 20 and 60" in said
    assert "coarser model" in said


def test_a_requantised_file_that_is_no_faster_should_not_be_served(
    monkeypatch: pytest.MonkeyPatch, published: Path
) -> None:
    pure = requantise(checked(published, paths.models_directory()))
    for took in ((0.03, 0.02), (0.03, 0.03)):
        well, said = compared(monkeypatch, pure, published, took)
        assert not well
        assert "remove `requantise:` below `target:`" in said
    assert compared(monkeypatch, pure, published, (0.02, 0.03))[0]


def test_a_form_that_cannot_be_made_is_said_and_no_more(monkeypatch: pytest.MonkeyPatch, published: Path) -> None:
    broken = published.with_name("broken.gguf")
    broken.write_bytes(published.read_bytes()[:5000])
    monkeypatch.setattr(findings, "requantise", lambda _file: requantise(ModelFile(broken, "0")))
    well, said = compared(monkeypatch, published, published, (0.03, 0.02))
    assert well
    assert "pure Q4_0, could not be tried" in said


@pytest.mark.parametrize(("draft", "well"), [(0.003, True), (0.006, False)])
def test_a_draft_that_takes_more_than_half_of_a_step_is_too_large(*, draft: float, well: bool) -> None:
    found = costs(proportional(0.01), proportional(draft))
    assert found.well is well
    assert ("choose a smaller draft" in found.sentence) is not well
    assert found.facts["draft_share"] == pytest.approx(draft / 0.01)


@dataclass
class Threads:
    """Stands for a context with so many threads."""

    count: int

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("slower", "well"), [(1.0, True), (1.5, False)])
def test_a_better_number_of_threads_is_advice(
    monkeypatch: pytest.MonkeyPatch, published: Path, slower: float, *, well: bool
) -> None:
    monkeypatch.setattr(findings, "usable_cores", lambda: 4)
    monkeypatch.setattr(findings, "one_slot", lambda _model, count, _rows: Threads(count))
    monkeypatch.setattr(findings, "steps", lambda used: [(1, 0.02 * (slower if used[0].count == 8 else 1))])
    model = LlamaModel(published)
    found = thread_count(model, 8)
    model.close()
    assert found.well is well
    assert ("set `threads: 4`" in found.sentence) is not well
