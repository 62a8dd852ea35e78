"""`scripts/doctor`: what its checks report, and when they advise a change."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from costs import proportional
from pairs import TinyFiles
from server import tiny
from specserve.cli import doctor
from specserve.cli.doctor import check_costs, check_software, check_torchserve
from specserve.config import ModelConfig
from specserve.core import loading
from tiny_models import HYBRID

PROJECT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
# What a worker does at its start.
START = """
import sys
from pathlib import Path
from specserve.cli.archive import prepared_handler
from specserve.core.loading import load_models
from specserve.errors import ModelLoadError
try:
    load_models(prepared_handler(Path(sys.argv[1])))
except ModelLoadError as error:
    print(error)
"""
TOPICS = ["cores", "software", "kernels", "memory", "repeating", "costs"]


def test_every_check_reports_a_finding() -> None:
    """Findings about speed depend on the machine; all others are good for the tiny pair."""
    command = ["scripts/doctor", "--config", str(tiny()), "--json"]
    outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    found = {finding["topic"]: finding for finding in json.loads(outcome.stdout)["findings"]}
    # A start may warn that others take the cores.
    assert [topic for topic in found if topic != "start"] == TOPICS
    assert outcome.returncode == (not all(finding["well"] for finding in found.values()))
    assert found["costs"]["facts"]["draft_share"] > 0
    assert all(found[topic]["well"] for topic in TOPICS if topic not in {"cores", "costs"})


def test_a_draft_that_does_not_fit_cannot_be_loaded_or_has_no_memory_is_what_a_start_goes_on_without(
    files: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little for both weights, or for both caches; files that are cut off, cannot draft, or have other tokens."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files.path("llama", "draft").read_bytes()[:5000])
    config, rest = files.config("llama"), 400 * 2**20
    weights = rest + files.path("llama", "target").stat().st_size
    for reason, draft, free in (
        ("no memory: the weights take", files.path("llama", "draft"), [2**40, weights]),
        ("no memory for a KV cache of 256 tokens", files.path("llama", "draft"), [2**40, 2**40, rest]),
        ("fetch it again", cut, []),
        ("has recurrent layers, which cannot go back", files.path(HYBRID, "draft"), []),
        ("does not fit the target llama-target.gguf", files.path("llama", "other"), []),
    ):
        free_memory = chain(free, repeat(2**40))
        monkeypatch.setattr(loading, "free_memory", lambda free_memory=free_memory: next(free_memory))
        found = {
            finding.topic: finding
            for finding in doctor.check_start(config.model_copy(update={"draft": ModelConfig(path=draft)}))
        }
        assert not found["start"].well
        assert reason in found["start"].sentence
        assert found["start"].sentence.endswith(". Serving goes on without the draft model.")
        assert found["memory"].well
        assert "There is no draft model" in found["costs"].sentence


def test_a_start_that_warns_is_well(files: TinyFiles) -> None:
    config = files.config(HYBRID).model_copy(update={"draft": None, "threads": 99})
    found = [*doctor.check_start(config)]
    assert all(finding.well for finding in found)
    told = " ".join(finding.sentence for finding in found if finding.topic == "start")
    assert "`threads: 99`, but only" in told
    assert "has recurrent layers: at most 7 tokens are drafted" in told


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup that has less memory than any worker takes."""
    own = re.findall(r"^\d+:memory:/(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    parent, limit = (CGROUPS / "memory" / own[0], "memory.limit_in_bytes") if own else (CGROUPS, "memory.max")
    group = parent / f"specserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error}): run this as root, outside of a container")
    (group / limit).write_text(str(400 * 2**20))
    yield group
    group.rmdir()


def test_where_memory_is_limited_doctor_and_a_start_say_the_same_and_nothing_is_killed(small_group: Path) -> None:
    def said(*command: str) -> str:
        enter = ["sh", "-c", f'echo $$ >{small_group}/cgroup.procs && exec "$@"', "sh", *command]
        return subprocess.run(enter, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False).stdout

    # What is free changes from one to the other.
    sentence = r"([\w-]+\.\w+: no memory: the weights take .*), but [34]\d\d MiB are free; (.*)"
    doctor = re.findall(sentence, said("scripts/doctor", "--config", str(tiny())))
    assert doctor
    assert re.findall(sentence, said(sys.executable, "-c", START, str(tiny()))) == doctor


def test_check_software_finds_a_java_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_software()
    assert found.well
    assert f"llama-cpp-python {found.facts['llama-cpp-python']}, " in found.sentence
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = check_software()
    assert not found.well
    assert f"{tmp_path}/bin/java does not run: set JAVA_HOME" in found.sentence


def test_check_torchserve_finds_what_an_operators_settings_lack(tmp_path: Path) -> None:
    """The guide's lines are enough, and so are ours."""
    [added] = re.findall(r"```properties\n(.*?)```", (PROJECT / "config" / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "config.properties"
    file.write_text(f"inference_address=http://127.0.0.1:9000\n{added}")
    assert check_torchserve(file).well
    assert check_torchserve(PROJECT / "config" / "config.properties").well
    file.write_text(
        "metrics_mode = log\nmax_response_size=999999999\nmodel_metrics_auto_detect=true\nenable_model_api=true\n"
    )
    found = check_torchserve(file)
    assert not found.well
    assert found.facts["missing"] == ["metrics_mode", "token_expiration_min"]
    assert "add metrics_mode=prometheus (otherwise Prometheus gets no metrics); token_expiration_min=" in found.sentence


def test_check_costs_finds_a_draft_slower_than_half_a_target_step() -> None:
    for draft, well in ((0.003, True), (0.006, False)):
        found = check_costs(proportional(0.01), proportional(draft))
        assert found.well is well
        assert ("choose a smaller draft" in found.sentence) is not well
        assert found.facts["draft_share"] == pytest.approx(draft / 0.01)
