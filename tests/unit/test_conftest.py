"""What tests/conftest.py adds to every run of pytest."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run(directory: Path, tests: str) -> str:
    """The output of pytest for a file with these tests."""
    shutil.copy(CONFTEST, directory)
    (directory / "test_these.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(directory), str(directory)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False).stdout


def test_a_run_ends_with_what_its_skipped_tests_need(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
import pytest

@pytest.mark.skipif(True, reason="no nginx is on PATH: apt install nginx")
@pytest.mark.parametrize("number", range(3))
def test_balancer(number): ...

def test_otherwise():
    pytest.skip("no gdb is on PATH: apt install gdb")
""",
    )
    *_, summary = output.partition("skipped tests, and what they need")
    _, *reasons, closing = filter(None, summary.splitlines())
    assert reasons == ["    1  no gdb is on PATH: apt install gdb", "    3  no nginx is on PATH: apt install nginx"]
    assert "4 skipped" in closing


def test_a_slow_machine_fails_no_property(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
import time
from hypothesis import given, settings, strategies as st

@settings(max_examples=2)
@given(st.booleans())
def test_slow(value):
    time.sleep(0.3)
""",
    )
    assert "1 passed" in output
