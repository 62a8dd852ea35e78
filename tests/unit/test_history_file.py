"""The file of finished answers: what one worker saves another reads, and what is no such file is said and ignored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specserve.serving.history_file import HistoryFile
from specserve.speculation.history import Pools

VOCABULARY = 1000


def filled() -> Pools:
    pools = Pools(1000)
    pools.add(("key", "a"), [1, 2], [3, 4, 5, 6])
    pools.add(("key", "b"), [1, 2], [3, 4, 5, 7])
    pools.add(("key", "a"), [1, 2], [8, 9, 10])
    return pools


def texts(pools: Pools) -> dict[tuple[str, str], list[int]]:
    names, tokens = pools.contents()
    return {name: [token for token in own.tolist() if token >= 0] for name, own in zip(names, tokens, strict=True)}


def test_the_next_worker_has_the_same_pools(tmp_path: Path) -> None:
    path = tmp_path / "history"
    HistoryFile(path, VOCABULARY).save(filled())
    pools = Pools(1000)
    HistoryFile(path, VOCABULARY).read_into(pools)
    assert texts(pools) == texts(filled())
    match = pools.of(("key", "b"))[0].match([3, 4, 5], 4)
    assert [row[:2] for row in match.following] == [[7, -1]], "where the answer ends is known, too"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["history"]


def test_a_smaller_history_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "history"
    pools = Pools(10_000)
    for number in range(900):
        pools.add(("", ""), [], [number, number, number])
    HistoryFile(path, VOCABULARY).save(pools)
    small = Pools(300)
    HistoryFile(path, VOCABULARY).read_into(small)
    assert small.of(("", ""))[0].match([899, 899], 1).following == []
    assert texts(small)["", ""][-3:] == [899, 899, 899]
    assert len(small.of(("", ""))[0]) <= 300


def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "history"
    pools, file = filled(), HistoryFile(path, VOCABULARY)
    file.save(pools)
    path.unlink()
    file.save(pools)
    assert not path.exists()
    pools.add(("key", "a"), [], [5])
    file.save(pools)
    assert path.exists()


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "pickle", "other vocabulary", "token out of range"])
def test_a_file_that_is_none_is_said_and_not_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history"
    HistoryFile(path, VOCABULARY).save(filled())
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("no archive")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "pickle":
        np.save(path.with_suffix(".npy"), np.array([{}], dtype=object), allow_pickle=True)
        path.with_suffix(".npy").replace(path)
    vocabulary = {"other vocabulary": 999, "token out of range": VOCABULARY}.get(damage, VOCABULARY)
    if damage == "token out of range":
        pools = Pools(1000)
        pools.add(("", ""), [], [VOCABULARY])
        HistoryFile(path, VOCABULARY).save(pools)
    pools = Pools(1000)
    HistoryFile(path, vocabulary).read_into(pools)
    assert texts(pools) == {}
    assert str(path) in caplog.text


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "missing" / "history"
    HistoryFile(path, VOCABULARY).save(filled())
    assert "cannot be saved" in caplog.text


def test_no_file_is_no_history(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pools = Pools(1000)
    HistoryFile(tmp_path / "history", VOCABULARY).read_into(pools)
    assert texts(pools) == {}
    assert not caplog.text


def test_any_damage_costs_the_history_and_not_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history"
    HistoryFile(path, VOCABULARY).save(filled())
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        HistoryFile(path, VOCABULARY).read_into(Pools(1000))
    # The zip's field of the compression method: a kind of error that no other damage has.
    path.write_bytes(whole[:8] + b"\x63" + whole[9:])
    HistoryFile(path, VOCABULARY).read_into(Pools(1000))
    assert "is not used" in caplog.text


def test_a_directory_that_is_none_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    HistoryFile(tmp_path / "file" / "history", VOCABULARY).save(filled())
    assert "cannot be saved" in caplog.text
