"""Traces, and the report that summarises them."""

import errno
import json
import stat
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from specserve.cli import report
from specserve.errors import ConfigError
from specserve.observability import trace as tracing
from specserve.observability.metrics import Served
from specserve.observability.records import Recorder
from specserve.observability.trace import Trace, open_traces
from specserve.sequence import DrafterName, RequestInfo
from specserve.speculation.step import SequenceStep
from steps import an_end, finished_step

FILE = "qwen-1.0.jsonl"


def a_round(drafts: list[DrafterName], accepted: int, family: str = "code") -> SequenceStep:
    return finished_step(RequestInfo("r", family), drafts, accepted, [7] * (accepted + 1), seconds=(0.01, 0.05, 0.001))


def test_a_round_and_an_end_are_a_line_each_without_who_asked(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE)
    trace.round(a_round(["model", "lookup"], 1))
    trace.end(an_end())
    first, second = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    of_a_round = {"event": "round", "drafts": ["model", "lookup"], "accepted": 1, "tokens": 2}
    asked = {"request": "r", "choice": 0, "family": "code", "group": "auto"}
    assert (of_a_round | asked | {"seconds": [0.01, 0.05, 0.001]}).items() <= first.items()
    assert (asked | {"event": "end", "reason": "stop", "ttft": 1.5, "tpot": 0.1}).items() <= second.items()
    assert not {"client", "cache_salt", "text"} & {*first, *second}


def test_files_are_rotated_and_readable_by_their_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_BYTES", 2000)
    trace = Trace(tmp_path / "traces" / FILE)
    for _ in range(100):
        trace.round(a_round([], 0))
    files = list((tmp_path / "traces").iterdir())
    assert len(files) == 5
    assert all(file.stat().st_size <= 2000 for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "traces").stat().st_mode) == 0o700


def test_a_file_that_another_user_may_have_planted_is_not_written(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep")
    (tmp_path / FILE).symlink_to(target)
    with pytest.raises(ConfigError, match=r"qwen-1\.0\.jsonl cannot be written \(.*symbolic"):
        open_traces(tmp_path, Served("qwen", "1.0"))
    assert target.read_text() == "keep"
    assert open_traces(None, Served("qwen", "1.0")) == []


def test_an_observer_that_fails_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    observer = Mock(end=Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    recorder = Recorder([observer])
    for _ in range(3):
        recorder.record_end(an_end())
    [record] = caplog.records
    assert record.getMessage() == f"specserve: {observer!r} is incomplete from now on"
    assert "No space left" in caplog.text


def test_report_has_acceptance_by_family_gamma_and_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace(tmp_path / FILE)
    trace.round(a_round(["model", "model"], 2))
    trace.round(a_round(["lookup", "model"], 0))
    trace.round(a_round([], 0))
    trace.round(a_round(["model"], 1, "prose"))
    trace.end(an_end())
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "round", "tr')
    assert report.run(Namespace(traces=[tmp_path / FILE], out=tmp_path / "page.html")) == 0
    assert "accepted" in (tmp_path / "page.html").read_text()
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    # Rounds, tokens, tokens a round, drafted, accepted, ms a token.
    assert ["code", "3", "5", "1.67", "4", "50%", "36.6"] in rows
    assert ["code", "2", "2", "4", "2.00", "4", "50%", "30.5"] in rows
    assert ["prose", "1", "1", "2", "2.00", "1", "100%", "30.5"] in rows
    # Of a position those are counted whose predecessors were all accepted.
    assert ["lookup", "1", "1", "0%"] in rows
    assert ["model", "2", "1", "100%"] in rows


def test_a_trace_without_rounds_cannot_be_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no round is recorded"):
        report.tables([tmp_path / "empty.jsonl"])
