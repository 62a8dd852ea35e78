"""The service is hardened, and the versions of both packages agree."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from specserve import __version__
from specserve.cli.paths import PROJECT


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
