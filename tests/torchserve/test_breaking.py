"""What breaks is given an end, and nothing else is lost: kills, crowds that leave, slow readers, full queues.

`scripts/test tests/torchserve/test_breaking.py -rP` says what was seen.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import requests

from server import PROJECT, Server, running, seconds_until, stop, tiny_but, until, worker, workers
from streams import GREEDY, LONG, answers, begin_streams, read, sequences

pytestmark = pytest.mark.server

# How long whatever broke may take to end, on a machine that is busy with other things too.
PATIENCE_SECONDS = 90
# Longer than the load itself by far, and long enough for four starts: they come 1, 1, 2, 3 and 5 seconds after an end.
DYING_SECONDS = 14


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, with a short queue and little patience with its worker."""
    config = tiny_but(tmp_path_factory.mktemp("breaking"), jobQueueSize=10, responseTimeout=5)
    with running(config=config) as server:
        yield server


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """What the server says while all is well."""
    return str(server.post(GREEDY).json()["choices"][0]["text"])


def seen(what: str) -> None:
    """Said where someone asks for it."""
    sys.stdout.write(f"{what}\n")


def test_a_killed_worker_ends_its_streams_and_another_one_serves(server: Server, text: str) -> None:
    killed = worker(server.state)
    with ThreadPoolExecutor(4) as pool:
        streams = begin_streams(pool, server, 4)
        killed.kill()
        back = seconds_until(lambda: answers(server), "an answer of the next worker")
        ends = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    seen(f"an answer of the next worker {back:.1f} s after the kill")
    assert all(end is not None for _, end in ends)
    assert worker(server.state).pid != killed.pid
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_after_a_request_that_comes_while_there_is_no_worker_the_next_one_serves(server: Server, text: str) -> None:
    """TorchServe 0.12 answers it, refuses it, or now and then hands it to the dead worker and leaves it hanging."""
    worker(server.state).kill()
    with contextlib.suppress(requests.Timeout):
        answer = server.post(GREEDY)
        assert answer.status_code in {200, 500, 503, 507}
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == text
    until(lambda: answers(server), "an answer of the next worker")


def test_a_worker_that_hangs_is_replaced(server: Server, text: str) -> None:
    """It stops in mid-answer; TorchServe gives it `responseTimeout`, and kills it."""
    stopped = worker(server.state)
    with ThreadPoolExecutor(2) as pool:
        streams = begin_streams(pool, server, 2)
        stopped.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        ends = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(end is not None for _, end in ends)
    until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, "the end of the hung worker")
    until(lambda: answers(server), "an answer of the next worker")
    seen(f"a response timeout of 5 s; an answer of the next worker {time.monotonic() - begun:.1f} s after the stop")
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_a_worker_that_dies_again_and_again_while_it_loads_is_started_again(server: Server, text: str) -> None:
    """Until its models are loaded at last: TorchServe tries for as long as `maxRetryTimeoutInSec` says."""
    died = {worker(server.state).pid}
    worker(server.state).kill()
    end = time.monotonic() + DYING_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
            started = worker(server.state)
            started.kill()
            died.add(started.pid)
        time.sleep(0.1)
    assert len(died) >= 4
    back = seconds_until(lambda: answers(server), "an answer of the next worker")
    seen(f"{len(died)} killed within {DYING_SECONDS} s; an answer {back:.1f} s later")
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_a_worker_that_is_killed_while_it_loads_for_the_first_time_delays_the_start() -> None:
    ours = str(PROJECT / ".specserve")
    before = {process.pid for process in workers(ours)}
    killed: list[int] = []

    def kill_the_first() -> None:
        until(lambda: any(process.pid not in before for process in workers(ours)), "a worker")
        first = next(process for process in workers(ours) if process.pid not in before)
        first.kill()
        killed.append(first.pid)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(kill_the_first)
        with running() as server:
            done.result()
            assert worker(server.state).pid not in killed
            assert answers(server)


def test_clients_vanish_by_the_hundred(server: Server, text: str) -> None:
    def come_and_go(number: int) -> None:
        with server.post({**LONG, "seed": number}, stream=True) as response:
            # A full queue is an answer as well.
            assert response.status_code in {200, 503}

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(come_and_go, range(200)))
    seen(f"idle {seconds_until(lambda: sequences(server) == (0, 0), 'an idle server'):.2f} s after the last one left")
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_a_reader_that_does_not_read_holds_nobody_up(server: Server) -> None:
    body = json.dumps(LONG).encode()
    head = (
        f"POST /predictions/qwen/1.0/v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}"
        f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(head.encode() + body)
        until(lambda: sequences(server)[0] >= 1, "a live stream")
        assert read(server, {**LONG, "max_tokens": 100})[1] is None
        until(lambda: sequences(server) == (0, 0), "the end of the stream that nobody reads")
        slow.settimeout(PATIENCE_SECONDS)
        got = b""
        # TorchServe keeps the connection; the stream's last chunk is the empty one.
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got += slow.recv(4096)
    assert got.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in got


def test_a_full_queue_is_a_503_and_what_was_taken_is_answered(server: Server, text: str) -> None:
    """A queue of ten takes ten of 60 long answers, and as many more as the worker has taken out by then."""
    whole = {**LONG, "stream": False}
    with ThreadPoolExecutor(60) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda _: server.post(whole), range(60))]
    seen(f"{statuses.count(200)} of 60 were answered, {statuses.count(503)} refused")
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 10
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_a_body_over_the_limit_is_a_413(server: Server, text: str) -> None:
    assert server.post({"prompt": "x" * (2 << 20)}).status_code == 413
    assert server.post(GREEDY).json()["choices"][0]["text"] == text


def test_stopping_during_streams_ends_them_and_leaves_no_process() -> None:
    with running() as server, ThreadPoolExecutor(4) as pool:
        process, client = worker(server.state), server.client()
        streams = begin_streams(pool, server, 4)
        begun = time.monotonic()
        stop(server)
        seen(f"stopped within {time.monotonic() - begun:.1f} s")
        ends = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(end is not None for _, end in ends)
    assert not process.is_running()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
