"""The servers that clients are sent to: ours, through TorchServe, and others with the same files and threads."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import requests

from clients import Endpoint, Queued
from llama_server import Server, build, python_example
from peer import Peer
from python_server import batching, one_by_one
from specserve.config import usable_cores
from specserve.tools.archive import handler_of
from specserve.tools.models import prepare
from specserve.tools.paths import PROJECT
from specserve.tools.torchserve_process import State

SLOTS = 8


def start_ours(stack: ExitStack, config: Path, port: int, *, with_tokens: bool = False) -> Endpoint:
    """This project's server, through TorchServe; with tokens, models can be registered there."""
    scripts, flags = PROJECT / "scripts", ["--port", str(port)]
    serve: list[str | Path] = [scripts / "serve", "--config", config, *flags, "--detach"]
    subprocess.run([*serve, *([] if with_tokens else ["--no-auth"])], check=True, stdout=subprocess.DEVNULL)
    stack.callback(lambda: subprocess.run([scripts / "stop", *flags], check=True, stdout=subprocess.DEVNULL))
    url = f"http://127.0.0.1:{State.of(port).ports.inference}/predictions/qwen/1.0"
    key = State.of(port).key("inference") if with_tokens else None
    return Endpoint("specserve", url, key=key, memory=partial(memory, port), queued=partial(queued, port))


def memory(port: int) -> int:
    """Mebibytes that this project's worker holds."""
    state = str(State.of(port).directory)
    commands = ((process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return sum(held_by(pid) for pid, command in commands if "model_service_worker" in command and state in command)


def queued(port: int) -> Queued:
    """How long requests have waited for a sequence of this project's worker; not what TorchServe's own queue took."""
    metrics = requests.get(f"http://127.0.0.1:{State.of(port).ports.metrics}/metrics", timeout=60).text.splitlines()
    parts = ("specserve_wait_seconds_sum{", "specserve_wait_seconds_count{")
    return Queued(*(sum(float(line.split()[-1]) for line in metrics if line.startswith(part)) for part in parts))


def held_by(pid: int) -> int:
    """Mebibytes that a process holds."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def start_theirs(stack: ExitStack, config: Path, *, python: bool = False) -> list[Endpoint]:
    """Other servers with the same files and threads: llama-server plain and with its drafts, the binding's own two."""
    binary = build()
    prepared = prepare(config)
    handler = handler_of(config, prepared)
    threads, context_length = handler.threads or usable_cores(), handler.context_length
    common = ["-m", str(prepared.target), "-t", str(threads), "--no-ui", "--cache-ram", "0"]
    common += ["-c", str(SLOTS * context_length)]
    modes = {"llama-server plain": common}
    if prepared.draft:
        drafts = ["--model-draft", str(prepared.draft), "--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
        modes["llama-server draft 3"] = common + drafts
    logs = binary.parent
    peers: dict[str, Peer] = {}
    for number, (name, options) in enumerate(modes.items()):
        peers[name] = Server(binary, options, logs / f"load-{number}.log", slots=SLOTS)
        stack.callback(peers[name].stop)
    if python:
        size = {"threads": threads, "context_length": context_length}
        peers["llama_cpp.server"] = one_by_one(prepared.target, logs / "one_by_one.log", **size)
        stack.callback(peers["llama_cpp.server"].stop)
        script, log = python_example(), logs / "batching.log"
        peers["llama_cpp example"] = batching(script, prepared.target, log, slots=SLOTS, **size)
        stack.callback(peers["llama_cpp example"].stop)
    for peer in peers.values():
        peer.wait()
    uncached = {"cache_prompt": False}
    return [
        Endpoint(name, peer.url, uncached if isinstance(peer, Server) else {}, partial(held_by, peer.pid))
        for name, peer in peers.items()
    ]
