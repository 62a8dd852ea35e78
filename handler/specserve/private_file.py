"""Files of this user alone, at paths where another user may have put something else."""

import errno
import os
import stat
from pathlib import Path


def open_private(path: Path | str, flags: int) -> int:
    """Open a file that is this user's and that nobody else may open, and return its descriptor: an opener for `open`.

    Raises:
        OSError: it cannot be opened, or is not such a file.
    """
    # Without waiting for somebody who writes into a pipe.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    wrong = (
        (not stat.S_ISREG(found.st_mode) and "it is not a regular file")
        or (found.st_uid != os.geteuid() and "it belongs to another user")
        or (found.st_mode & 0o077 and "other users may open it")
    )
    if wrong:
        os.close(file)
        raise OSError(errno.EPERM, wrong, str(path))
    return file
