"""nginx with config/nginx/specserve.conf before a server (Debian: nginx-light)."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server import PATIENCE_SECONDS, PROJECT, free_ports, until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx is on PATH: apt install nginx")

KEY = "sk-of.a+test"


@contextmanager
def balancing(first: int, second: int, directory: Path, *keys: str, max_connections: int = 64) -> Iterator[str]:
    """OpenAI's base URL of nginx with our configuration; only ports, keys and the limit of a key are changed."""
    port = free_ports(1)
    text = (PROJECT / "config" / "nginx" / "specserve.conf").read_text()
    for old, new in (
        ("limit_conn keys 64;", f"limit_conn keys {max_connections};"),
        ("127.0.0.1:8080", f"127.0.0.1:{first}"),
        ("127.0.0.1:9080", f"127.0.0.1:{second}"),
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (directory / "specserve.conf").write_text(text)
    (directory / "keys.map").write_text("".join(f'"~^Bearer {re.escape(key)}$" 1;\n' for key in (KEY, *keys)))
    process = subprocess.Popen([*_command(directory), "-g", "daemon off;"])
    try:
        with socket.socket() as probe:
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, "nginx answers")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def switch(directory: Path, before: str, after: str) -> None:
    """Send new requests to another version, as the guide says."""
    file = directory / "specserve.conf"
    file.write_text(file.read_text().replace(f"/qwen/{before}/", f"/qwen/{after}/"))
    subprocess.run([*_command(directory), "-s", "reload"], check=True)


def _command(directory: Path) -> list[str]:
    return [str(NGINX), "-p", str(directory), "-c", str(directory / "specserve.conf")]
