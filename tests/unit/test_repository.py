"""What GitHub and pre-commit read is valid and calls what is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve import __version__
from specserve.cli.paths import PROJECT

GITHUB = PROJECT / ".github"
PRE_COMMIT = PROJECT / ".pre-commit-config.yaml"


def read(path: Path) -> Any:
    """The content of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def workflow() -> Any:
    """The job of the workflow."""
    return read(GITHUB / "workflows" / "ci.yml")["jobs"]["ci"]


def runs() -> list[dict[str, str]]:
    """What the job runs, a combination of Python and command each."""
    included: list[dict[str, str]] = workflow()["strategy"]["matrix"]["include"]
    return included


@pytest.mark.parametrize("path", [*sorted(GITHUB.rglob("*.yml")), PRE_COMMIT], ids=lambda path: path.name)
def test_yaml_file_parses_to_a_mapping(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_every_supported_python_passes_what_every_change_has_to_pass() -> None:
    with (PROJECT / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    supported = {name.rpartition(" ")[2] for name in classifiers if name.startswith("Programming Language :: Python")}
    assert {run["python"] for run in runs() if run["run"] == ".ci/run"} == supported
    assert "${{ matrix.run }}" in [step.get("run") for step in workflow()["steps"]]


def test_workflow_runs_files_that_exist() -> None:
    named = [word for run in runs() for word in shlex.split(run["run"]) if "/" in word]
    assert [word for word in named if not (PROJECT / word).exists()] == []
    assert "tests/engine/test_kernels.py" in named


def test_commit_hooks_run_programs_of_the_lock_file() -> None:
    locked = (PROJECT / "requirements-dev.lock").read_text(encoding="utf-8")
    [repository] = read(PRE_COMMIT)["repos"]
    assert repository["repo"] == "local"
    programs = {Path(hook["entry"].split()[0]) for hook in repository["hooks"]}
    assert {program.parent.as_posix() for program in programs} == {".venv/bin"}
    for program in programs:
        assert re.search(rf"^{program.name}==", locked, re.MULTILINE), program


def test_the_kernels_have_the_version_of_the_package() -> None:
    with (PROJECT / "handler" / "kernels" / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == __version__


def test_bug_report_asks_for_what_the_server_and_the_doctor_say() -> None:
    asked = {field.get("id"): field["attributes"] for field in read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert "v1/speculation" in asked["speculation"]["label"]
    assert "scripts/doctor" in asked["doctor"]["label"]
