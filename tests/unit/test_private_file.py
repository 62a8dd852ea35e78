"""A file is opened only if it is this user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specserve.private_file import open_private


def test_a_new_file_is_this_users_alone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w", opener=open_private) as file:
        file.write("text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    with open(tmp_path / "file", opener=open_private) as file:
        assert file.read() == "text"


@pytest.mark.parametrize("planted", ["a link", "a pipe", "a directory", "a file that others may read or write"])
def test_something_else_is_refused_at_once_left_alone_and_closed(tmp_path: Path, planted: str) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_text("keep")
    target.chmod(0o600)
    if planted == "a link":
        path.symlink_to(target)
    elif planted == "a pipe":
        os.mkfifo(path, 0o600)
    elif planted == "a directory":
        path.mkdir(0o700)
    else:
        path.write_text("keep")
        path.chmod(0o644)
    before, n_open = path.lstat(), len(list(Path("/proc/self/fd").iterdir()))
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"symbolic|regular|directory|other users may open it"):
            open_private(path, flags)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open
    assert path.lstat() == before
    assert target.read_text() == "keep"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(OSError, match="another user"):
        open_private(tmp_path / "file", os.O_RDWR)
