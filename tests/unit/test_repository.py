"""What GitHub and pre-commit run is there, and the versions of both packages agree."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
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


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze is on PATH: apt install systemd"
)
def test_the_service_is_valid_and_hardened(tmp_path: Path) -> None:
    """By systemd's own check; of ten points of exposure a service without settings has 9.6."""
    service = (PROJECT / "config" / "systemd" / "specserve.service").read_text()
    unit = tmp_path / "specserve.service"
    # The machine has no such directory.
    unit.write_text(service.replace("/opt/specserve/scripts/serve", "/bin/true"))
    outcome = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    check: list[str | Path] = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0


def test_the_kernels_have_the_version_of_the_package() -> None:
    kernels = tomllib.loads((PROJECT / "handler" / "kernels" / "pyproject.toml").read_text())
    assert kernels["project"]["version"] == __version__
