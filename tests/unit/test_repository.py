"""What GitHub and pre-commit run is there, and the versions of both packages agree."""

import tomllib
from pathlib import Path

import yaml

from specserve import __version__
from specserve.cli.paths import PROJECT


def test_every_supported_python_passes_what_every_change_has_to_pass() -> None:
    classifiers = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = {name.rpartition(" ")[2] for name in classifiers if name.startswith("Programming Language :: Python")}
    job = yaml.safe_load((PROJECT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["ci"]
    runs = job["strategy"]["matrix"]["include"]
    assert {run["python"] for run in runs if run["run"] == ".ci/run"} == supported
    named = [word for run in runs for word in run["run"].split() if "/" in word]
    assert [word for word in named if not (PROJECT / word).exists()] == []


def test_commit_hooks_run_programs_of_the_lock_file() -> None:
    locked = (PROJECT / "scripts" / "locks" / "dev.txt").read_text()
    [repository] = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        assert f"\n{Path(hook['entry'].split()[0]).name}==" in locked


def test_the_kernels_have_the_version_of_the_package() -> None:
    kernels = tomllib.loads((PROJECT / "handler" / "kernels" / "pyproject.toml").read_text())
    assert kernels["project"]["version"] == __version__
