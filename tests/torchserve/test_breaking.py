"""Killed and hung workers, many disconnects, full queues: affected requests end, the others are served.

`scripts/test tests/torchserve/test_breaking.py -rP` prints the measurements.
"""

import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from server import PATIENCE_SECONDS, Server, free_ports, processes, running, stop, until, worker, workers
from streams import LONG, begin_streams, greedy_text, is_serving, sequences
from tiny_config import tiny_config

pytestmark = pytest.mark.server

# The worker and the four after it, which are started 1, 1, 2 and 3 seconds later and killed while they load.
KILLS = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a short queue and a short response timeout, whose first worker is killed in its first load."""
    config = tiny_config(tmp_path_factory.mktemp("breaking"), jobQueueSize=10, responseTimeout=5)
    port = free_ports()
    state = Server(port).state

    def kill_the_first() -> int:
        until(lambda: bool(workers(state)), "a worker")
        first = worker(state)
        first.kill()
        return first.pid

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_the_first)
        with running(config=config, port=port) as server:
            assert worker(state).pid != killed.result()
            yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    return greedy_text(server)


def report(measurement: str) -> None:
    """Print a measurement, which pytest shows with -rP."""
    sys.stdout.write(f"{measurement}\n")


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_the_streams_of_a_killed_or_hung_worker_end_and_the_next_worker_serves(
    server: Server, expected: str, kind: signal.Signals
) -> None:
    """TorchServe kills one that hangs after `responseTimeout`."""
    broken = worker(server.state)
    with ThreadPoolExecutor(4) as pool:
        streams = begin_streams(pool, server, 4)
        broken.send_signal(kind)
        started = time.monotonic()
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(error is not None for _, error in results)
    until(lambda: not broken.is_running() or broken.status() == psutil.STATUS_ZOMBIE, "the end of the worker")
    until(lambda: is_serving(server), "an answer of the next worker")
    report(f"an answer of the next worker {time.monotonic() - started:.1f} s after {kind.name}")
    assert worker(server.state).pid != broken.pid
    assert greedy_text(server) == expected


def test_a_worker_killed_repeatedly_while_it_loads_is_restarted(server: Server, expected: str) -> None:
    """TorchServe retries for `maxRetryTimeoutInSec`, until the models are loaded."""
    killed: set[int] = set()

    def kill_another() -> bool:
        for process in workers(server.state):
            if process.pid not in killed:
                process.kill()
                killed.add(process.pid)
        return len(killed) == KILLS

    killing = until(kill_another, f"{KILLS} workers")
    seconds = until(lambda: is_serving(server), "an answer of the next worker")
    report(f"{KILLS} killed within {killing:.0f} s; an answer {seconds:.1f} s later")
    assert greedy_text(server) == expected


def test_200_disconnected_streams_leave_the_server_idle(server: Server, expected: str) -> None:
    def start_and_disconnect(number: int) -> None:
        with server.post({**LONG, "seed": number}, stream=True) as response:
            # The queue may be full.
            assert response.status_code in {200, 503}

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(start_and_disconnect, range(200)))
    report(f"idle {until(lambda: sequences(server) == (0, 0), 'an idle server'):.2f} s after the last one left")
    assert greedy_text(server) == expected


def test_a_full_queue_is_a_503_a_body_over_the_limit_a_413_and_accepted_requests_are_answered(
    server: Server, expected: str
) -> None:
    """Of 60 long requests a queue of ten accepts ten, and as many more as the worker has taken from it by then."""
    whole = {**LONG, "stream": False}
    with ThreadPoolExecutor(60) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda _: server.post(whole), range(60))]
    report(f"{statuses.count(200)} of 60 were answered, {statuses.count(503)} refused")
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 10
    assert server.post({"prompt": "x" * (2 << 20)}).status_code == 413
    assert greedy_text(server) == expected


def test_stop_during_streams_ends_them_and_leaves_no_process(server: Server) -> None:
    """The last test of this file: it stops the server."""
    with ThreadPoolExecutor(4) as pool:
        client = server.client()
        # So many answers that none of the streams ends by itself while the script starts.
        streams = begin_streams(pool, server, 4, {**LONG, "n": 64, "speculation": {"mode": "off"}})
        started = time.monotonic()
        stop(server)
        report(f"stopped within {time.monotonic() - started:.1f} s")
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(error is not None for _, error in results)
    assert not processes(server.state)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
