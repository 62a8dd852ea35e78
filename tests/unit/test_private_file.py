"""A file is opened only if it is this user's alone."""

import os
import stat
from itertools import product
from pathlib import Path

import pytest

from specserve.private_file import open_private


def test_a_new_file_is_this_users_alone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w", opener=open_private) as file:
        file.write("text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    with open(tmp_path / "file", opener=open_private) as file:
        assert file.read() == "text"


def test_something_else_is_refused_at_once_left_alone_and_closed(tmp_path: Path) -> None:
    names = ("target", "link", "pipe", "directory", "shared")
    target, link, pipe, directory, shared = (tmp_path / name for name in names)
    target.write_text("keep")
    target.chmod(0o600)
    link.symlink_to(target)
    os.mkfifo(pipe, 0o600)
    directory.mkdir(0o700)
    shared.touch(0o644)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    for path, flags in product((link, pipe, directory, shared), (os.O_RDONLY, os.O_RDWR | os.O_CREAT)):
        before = path.lstat()
        with pytest.raises(OSError, match=r"symbolic|regular|directory|other users may open it"):
            open_private(path, flags)
        assert path.lstat() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open
    assert target.read_text() == "keep"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(OSError, match="another user"):
        open_private(tmp_path / "file", os.O_RDWR)
