"""Prefixes on disk: what a worker has stored the next one has, bit for bit, or it is computed again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.serving.prefix_files import PrefixFiles
from specserve.serving.prefix_store import BLOCK_TOKENS, PrefixStore
from stored_texts import BLOCK_BYTES, TOKEN_BYTES, Text, added, joined, stored, tokens_of

TEXT = Text(tokens_of(1, 2, 3))


class Worker:
    """A store whose blocks are written to a directory, and read when it starts; `with` ends when all that is done."""

    def __init__(
        self, directory: Path, *, blocks: int = 99, identity: str = "qwen", token_bytes: int = TOKEN_BYTES
    ) -> None:
        self.files = PrefixFiles(directory, identity)
        self.store = PrefixStore(token_bytes, blocks * BLOCK_BYTES, self.files)
        self.files.read_into(self.store)

    def __enter__(self) -> PrefixStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.files.close()


def restarted(directory: Path, *, blocks: int = 99) -> PrefixStore:
    """The store of the next worker, after it has read all files."""
    with Worker(directory, blocks=blocks) as store:
        return store


def files(directory: Path) -> list[Path]:
    """The files of the first worker's blocks, in the order in which they were written."""
    found = [path for path in (directory / "0").iterdir() if path.name != "lock"]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def wait_for_files(directory: Path, count: int) -> None:
    """Wait until the first worker has written so many blocks."""
    give_up = time.monotonic() + 300
    while len(files(directory)) != count:
        assert time.monotonic() < give_up
        time.sleep(0.001)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the three blocks of a text."""
    with Worker(tmp_path / "prefixes") as store:
        added(store, 1, 2, 3)
    return tmp_path / "prefixes"


def test_the_next_worker_has_the_keys_of_the_last_bit_for_bit(directory: Path) -> None:
    store = restarted(directory)
    assert np.array_equal(joined(store.saved(TEXT.tokens, 0, 96)), TEXT.keys(0, 96))
    assert store.record.stored_bytes == 3 * BLOCK_BYTES


def test_the_first_worker_of_a_directory_has_nothing(tmp_path: Path) -> None:
    assert restarted(tmp_path / "a" / "b").record.stored_bytes == 0


def test_what_is_evicted_is_removed_from_the_disk(tmp_path: Path) -> None:
    with Worker(tmp_path, blocks=3) as store:
        added(store, 1, 2)
        added(store, 3)
        wait_for_files(tmp_path, 3)
        added(store, 4, 5)
    assert len(files(tmp_path)) == 3
    store = restarted(tmp_path)
    assert [stored(store, *parts) for parts in ((1, 2), (3,), (4, 5))] == [0, 1, 2]


def test_what_is_evicted_before_it_was_written_leaves_no_file(tmp_path: Path) -> None:
    with Worker(tmp_path, blocks=1) as store:
        for number in range(50):
            added(store, number)
    assert len(files(tmp_path)) == 1


def test_a_block_that_comes_back_is_written_again(tmp_path: Path) -> None:
    with Worker(tmp_path, blocks=1) as store:
        for number in (1, 2, 1):
            added(store, number)
    assert stored(restarted(tmp_path), 1) == 1


def test_branches_come_back_as_branches(directory: Path) -> None:
    with Worker(directory) as store:
        added(store, 1, 2, 4)
        added(store, 5)
    store = restarted(directory)
    assert store.record.stored_bytes == 5 * BLOCK_BYTES
    assert [stored(store, *parts) for parts in ((1, 2, 3), (1, 2, 4), (5,))] == [3, 3, 1]


def test_the_newest_texts_come_back_where_there_is_less_room_than_before(directory: Path) -> None:
    with Worker(directory) as store:
        added(store, 4, 5)
    store = restarted(directory, blocks=3)
    assert [stored(store, 4, 5), stored(store, 1, 2, 3)] == [2, 1]
    assert len(files(directory)) == 3


def test_workers_that_run_at_the_same_time_have_files_of_their_own(directory: Path) -> None:
    with Worker(directory) as first, Worker(directory) as second:
        added(first, 4)
        added(second, 6)
    with Worker(directory) as first, Worker(directory) as second:
        pass
    assert [stored(first, *parts) for parts in ((1, 2, 3), (4,), (6,))] == [3, 1, 0]
    assert [stored(second, *parts) for parts in ((1, 2, 3), (4,), (6,))] == [0, 0, 1]


def test_files_hold_texts_and_can_be_read_by_their_owner_only(directory: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in (directory, directory / "0")} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (directory / "0").iterdir()} == {0o600}


def check_that_only(blocks: int, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the next worker has these first blocks of the text only, says so once, and removes the others."""
    caplog.clear()
    store = restarted(directory)
    assert np.array_equal(joined(store.saved(TEXT.tokens, 0, 96)), TEXT.keys(0, blocks * BLOCK_TOKENS))
    assert store.record.stored_bytes == blocks * BLOCK_BYTES
    assert len(files(directory)) == blocks
    [line] = caplog.records
    assert f"{3 - blocks} of 3 files" in line.getMessage()


@pytest.mark.parametrize(
    "options",
    [{"identity": "another model"}, {"identity": "qwen "}, {"token_bytes": TOKEN_BYTES * 2}, {"token_bytes": 8}],
)
def test_files_of_another_model_kernel_or_format_are_removed(
    directory: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with Worker(directory, **options) as store:
        pass
    assert store.record.stored_bytes == 0
    assert not files(directory)
    [line] = caplog.records
    assert "3 of 3 files" in line.getMessage()


def test_no_file_is_used_of_which_a_bit_of_any_byte_has_changed(tmp_path: Path) -> None:
    with Worker(tmp_path) as store:
        added(store, 1)
    [path] = files(tmp_path)
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert restarted(tmp_path).record.stored_bytes == 0, f"byte {position}"
        assert not path.exists()
    path.write_bytes(intact)
    assert restarted(tmp_path).record.stored_bytes == BLOCK_BYTES


def test_no_file_is_used_that_was_cut_off_or_lengthened(tmp_path: Path) -> None:
    with Worker(tmp_path) as store:
        added(store, 1)
    [path] = files(tmp_path)
    intact = path.read_bytes()
    for content in (*(intact[:length] for length in range(len(intact))), intact + b"\0", intact * 2):
        path.write_bytes(content)
        assert restarted(tmp_path).record.stored_bytes == 0, f"{len(content)} bytes"
        assert not path.exists()


def replace_by_a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros, as after a crash of the machine": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "not readable": replace_by_a_link_to_itself,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("number", range(3))
def test_of_a_text_with_a_damaged_block_what_is_before_it_is_used(
    directory: Path, caplog: pytest.LogCaptureFixture, number: int, damage: str
) -> None:
    DAMAGE[damage](files(directory)[number])
    check_that_only(number, directory, caplog)


def test_what_follows_a_block_without_a_file_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    files(directory)[1].unlink()
    store = restarted(directory)
    assert store.record.stored_bytes == BLOCK_BYTES
    assert len(files(directory)) == 1
    assert "1 of 2 files" in caplog.text


def test_a_file_with_the_name_of_another_block_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = files(directory)
    second.write_bytes(first.read_bytes())
    check_that_only(1, directory, caplog)


def test_half_a_file_of_a_worker_that_was_killed_is_removed(directory: Path) -> None:
    part = files(directory)[0].with_suffix(".part")
    part.write_bytes(b"half")
    assert stored(restarted(directory), 1, 2, 3) == 3
    assert not part.exists()


def test_other_files_are_left_alone(directory: Path) -> None:
    others = [directory / "0" / name for name in ("notes.txt", "A" * 64, "a" * 63)]
    for path in others:
        path.write_text("mine")
    assert stored(restarted(directory), 1, 2, 3) == 3
    assert [path.read_text() for path in others] == ["mine"] * 3


def test_a_full_disk_is_logged_once_and_memory_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    worker = Worker(directory)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        added(worker.store, 7, 8)
        added(worker.store, 9)
        worker.files.close()
    [line] = caplog.records
    assert "No space left on device" in line.getMessage()
    assert [stored(worker.store, *parts) for parts in ((1, 2, 3), (7, 8), (9,))] == [3, 2, 1]
    assert len(files(directory)) == 3


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        PrefixFiles(tmp_path / "file" / "prefixes", "qwen")
