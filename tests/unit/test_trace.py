"""Traces, and the report that is generated from them."""

from __future__ import annotations

import errno
import json
import os
import stat
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from specserve.cli.report import Piece, main, page, summarise, whole_characters
from specserve.config import TraceConfig
from specserve.errors import ConfigError
from specserve.observability.metrics import Served
from specserve.observability.records import EndRecord
from specserve.observability.trace import Trace, open_traces
from specserve.sequence import DrafterName, Group, RequestInfo
from specserve.speculation.step import Step
from steps import finished_step

WORDS = {1: b"def ", 2: b"sort", 3: b"(<b>", 4: b")", 5: b"\xff"}


def a_round(request: str, drafts: list[DrafterName], accepted: int, tokens: list[int]) -> Step:
    return finished_step(RequestInfo(request, "code"), drafts, accepted, tokens, seconds=(0.01, 0.05, 0.001))


def an_end(request: str, group: Group = "auto") -> EndRecord:
    return EndRecord(RequestInfo(request, "code", group), 0, "stop", 40, 30, 20, 2, waited=0.5, ttft=1.5, tpot=0.1)


def trace(directory: Path, *, share: float = 1.0, mebibytes: float = 1.0, text: bool = True) -> Trace:
    return Trace(
        directory / "qwen-1.0.jsonl", share=share, mebibytes=mebibytes, text=WORDS.__getitem__ if text else None
    )


def lines(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "qwen-1.0.jsonl").read_text().splitlines()]


def test_round_is_written_as_one_line(tmp_path: Path) -> None:
    writer = trace(tmp_path)
    writer.round(a_round("r1", ["model", "lookup"], 1, [1, 2]))
    writer.end(an_end("r1"))
    first, second = lines(tmp_path)
    assert first["event"] == "round"
    assert (first["drafts"], first["accepted"], first["text"]) == (["model", "lookup"], 1, ["def ", "sort"])
    assert (first["request"], first["choice"], first["family"], first["group"]) == ("r1", 0, "code", "auto")
    assert second["event"] == "end"
    assert (second["reason"], second["ttft"], second["tpot"]) == ("stop", 1.5, 0.1)


def test_character_split_between_tokens_is_restored_by_joining_them(tmp_path: Path) -> None:
    halves = {1: "é".encode()[:1], 2: "é".encode()[1:]}
    writer = Trace(tmp_path / "qwen-1.0.jsonl", share=1.0, mebibytes=1.0, text=halves.__getitem__)
    writer.round(a_round("r1", ["model"], 1, [1, 2]))
    [line] = lines(tmp_path)
    assert "".join(line["text"]).encode(errors="surrogateescape").decode() == "é"
    assert "é" in page(summarise([tmp_path / "qwen-1.0.jsonl"]))


def test_report_shows_a_split_character_with_the_token_that_completes_it() -> None:
    first, second = ("é".encode()[index : index + 1].decode(errors="surrogateescape") for index in (0, 1))
    written = [Piece("caf", "plain"), Piece(first, "accepted"), Piece(second, "bonus"), Piece(first, "recovered")]
    assert whole_characters(written) == [
        Piece("caf", "plain"),
        Piece("", "accepted"),
        Piece("é", "bonus"),
        Piece("", "recovered"),
        Piece("\ufffd", "recovered"),
    ]


def test_trace_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    writer = trace(tmp_path / "traces", mebibytes=0.01)
    for _ in range(100):
        writer.round(a_round("r1", [], 0, [1]))
    files = list((tmp_path / "traces").iterdir())
    assert len(files) > 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "traces").stat().st_mode) == 0o700


def test_a_file_that_another_user_may_have_planted_is_not_written(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep")
    for traces in (tmp_path / "linked", tmp_path / "open"):
        traces.mkdir()
    (tmp_path / "linked" / "qwen-1.0.jsonl").symlink_to(target)
    (tmp_path / "open" / "qwen-1.0.jsonl").touch(0o666)
    for traces in (tmp_path / "linked", tmp_path / "open"):
        config = TraceConfig(directory=traces)
        with pytest.raises(ConfigError, match=r"qwen-1\.0\.jsonl cannot be written \(.*(symbolic|other users)"):
            open_traces(config, Served("qwen", "1.0"), WORDS.__getitem__)
    assert target.read_text() == "keep"


def test_text_is_written_only_if_configured(tmp_path: Path) -> None:
    trace(tmp_path, text=False).round(a_round("r1", [], 0, [1]))
    assert "text" not in lines(tmp_path)[0]


def test_request_is_traced_completely_or_not_at_all(tmp_path: Path) -> None:
    writer = trace(tmp_path, share=0.3)
    for number in range(300):
        writer.round(a_round(f"r{number}", [], 0, [1]))
        writer.round(a_round(f"r{number}", [], 0, [1]))
        writer.end(an_end(f"r{number}"))
    counts: dict[str, int] = {}
    for line in lines(tmp_path):
        counts[line["request"]] = counts.get(line["request"], 0) + 1
    assert set(counts.values()) == {3}
    assert 50 < len(counts) < 130


def test_trace_files_are_rotated_within_the_size_limit(tmp_path: Path) -> None:
    writer = trace(tmp_path, mebibytes=0.05)
    for number in range(2000):
        writer.round(a_round(f"r{number}", ["model"] * 3, 2, [1, 2, 3]))
    files = list(tmp_path.iterdir())
    assert len(files) == 5
    assert sum(file.stat().st_size for file in files) < 0.06 * 2**20
    assert lines(tmp_path)[-1]["request"] == "r1999"


def test_full_disk_stops_the_trace_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = trace(tmp_path)
    monkeypatch.setattr(RotatingFileHandler, "shouldRollover", full)
    for _ in range(3):
        writer.round(a_round("r", [], 0, [1]))
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    assert caplog.records[0].exc_info is None


def test_report_shows_families_positions_and_the_kind_of_each_token(tmp_path: Path) -> None:
    writer = trace(tmp_path)
    writer.round(a_round("r1", ["model", "model"], 2, [1, 2, 3]))
    writer.round(a_round("r1", ["lookup", "model"], 0, [4]))
    writer.round(a_round("r1", [], 0, [5]))
    writer.end(an_end("r1"))
    report = summarise([tmp_path / "qwen-1.0.jsonl"])
    family = report.families["code"]
    assert (family.answers, family.rounds, family.tokens) == (1, 3, 5)
    assert family.acceptance_by_position == [(1, 0.5, 2), (2, 1.0, 1)]
    assert [piece.kind for piece in report.answers["r1 (1)"]] == ["accepted", "accepted", "bonus", "recovered", "plain"]
    html = page(report)
    assert '<span class="bonus">(&lt;b&gt;</span>' in html
    assert '<span class="accepted">def </span>' in html
    assert "http" not in html.replace("http-equiv", "")


@pytest.mark.parametrize(("groups", "says_so"), [(["auto", "off"], True), (["auto", "holdback"], False)])
def test_report_says_how_to_get_a_control_group_where_there_is_none(
    tmp_path: Path, groups: list[Group], *, says_so: bool
) -> None:
    writer = trace(tmp_path)
    for group in groups:
        writer.round(a_round(group, ["model"], 1, [1, 2]))
        writer.end(an_end(group, group))
    html = page(summarise([tmp_path / "qwen-1.0.jsonl"]))
    assert ("There is no control group" in html) == ("speculation.holdback: 0.02" in html) == says_so


def test_files_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    trace(tmp_path).round(a_round("r1", [], 0, [1, 2]))
    newer = tmp_path / "qwen-1.0.jsonl"
    record = json.loads(newer.read_text())
    older = tmp_path / "qwen-1.0.jsonl.1"
    older.write_text(json.dumps({**record, "time": record["time"] - 1, "text": record["text"][::-1]}) + "\n")
    texts = [
        [piece.text for pieces in summarise(files).answers.values() for piece in pieces]
        for files in ([newer, older], [older, newer])
    ]
    assert texts[0] == texts[1] == [*record["text"][::-1], *record["text"]]


def test_truncated_line_is_skipped_and_reported(tmp_path: Path) -> None:
    writer = trace(tmp_path)
    writer.round(a_round("r1", [], 0, [1]))
    file = tmp_path / "qwen-1.0.jsonl"
    file.write_text(file.read_text() + '{"event": "round", "re')
    report = summarise([file])
    assert report.skipped == 1
    assert "1 lines that are no records" in page(report)


def test_trace_without_rounds_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="no round is recorded"):
        summarise([empty])
    with pytest.raises(ConfigError, match="cannot be read"):
        summarise([tmp_path / "missing.jsonl"])


def test_report_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(tmp_path).round(a_round("r1", ["model"], 1, [1, 2]))
    out = tmp_path / "page.html"
    assert main([str(tmp_path / "qwen-1.0.jsonl"), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
