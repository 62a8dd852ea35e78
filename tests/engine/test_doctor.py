"""`scripts/doctor`: what its checks report, and when they advise a change."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from costs import proportional
from specserve.cores import Usable
from specserve.engine.llama_model import LlamaModel
from specserve.tools import doctor, paths
from specserve.tools.doctor import check_costs, check_threads
from specserve.tools.tiny_models import write_tiny

PROJECT = Path(__file__).parents[2]
TOPICS = [
    *("machine", "kernels", "models", "repeating", "pair"),
    *("costs", "threads", "greedy", "sampling"),
]


def test_every_check_reports_a_finding() -> None:
    """Findings about speed depend on the machine; all others are good for the tiny pair."""
    command = ["scripts/doctor", "--config", "config/tiny.yaml", "--json"]
    outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    found = {finding["topic"]: finding for finding in json.loads(outcome.stdout)["findings"]}
    assert list(found) == TOPICS
    assert outcome.returncode == (not all(finding["well"] for finding in found.values()))
    assert found["costs"]["facts"]["draft_share"] > 0
    assert all(found[topic]["well"] for topic in ("kernels", "models", "repeating", "pair", "greedy", "sampling"))
    assert found["greedy"]["facts"]["differing"] == 0
    assert found["sampling"]["facts"]["standard_deviations"].keys() == {"token", "block", "coupled"}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published target file in the models directory."""
    monkeypatch.setattr(paths, "models_directory", lambda: tmp_path)
    file = tmp_path / "published.gguf"
    write_tiny(file, "qwen2", "target")
    return file


@pytest.mark.parametrize(("draft", "well"), [(0.003, True), (0.006, False)])
def test_check_costs_finds_a_draft_slower_than_half_a_target_step(*, draft: float, well: bool) -> None:
    found = check_costs(proportional(0.01), proportional(draft))
    assert found.well is well
    assert ("choose a smaller draft" in found.sentence) is not well
    assert found.facts["draft_share"] == pytest.approx(draft / 0.01)


@dataclass
class Threads:
    """A stub for an engine with a number of threads."""

    count: int

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("slower", "well"), [(1.0, True), (1.5, False)])
def test_check_threads_advises_a_faster_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, published: Path, slower: float, *, well: bool
) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: Usable((0, 1, 2, 3), 4))
    monkeypatch.setattr(doctor, "one_slot_engine", lambda _model, count, _rows: Threads(count))
    monkeypatch.setattr(doctor, "time_passes", lambda used: [(1, 0.02 * (slower if used[0].count == 8 else 1))])
    model = LlamaModel(published)
    found = check_threads(model, 8)
    model.close()
    assert found.well is well
    assert ("set `threads: 4`" in found.sentence) is not well
