"""benchmarks/worst_cases.py sends what a server takes, or the limit that it names is not what holds it."""

import threading
import time
from typing import Any

from servers import Endpoint
from specserve.cli.paths import DEFAULT_CONFIG
from specserve.config import load_yaml
from streaming_server import streaming_server
from worst_cases import CASES, Measure, Stream


def test_cases_ask_for_as_many_drafts_as_a_request_may() -> None:
    """One more, and it is refused before it costs anything."""
    _, handler = load_yaml(DEFAULT_CONFIG)
    drafts = [case.body()["speculation"]["gamma"] for case in CASES if "speculation" in case.body()]
    assert drafts == [handler.speculation.max_gamma] * 5


def test_a_newcomer_sends_new_prompts_and_its_longest_wait_counts() -> None:
    bodies: list[dict[str, Any]] = []
    begun, held, free = threading.Event(), threading.Event(), threading.Event()

    def read(body: dict[str, Any]) -> None:
        bodies.append(body)
        if begun.is_set():
            held.set()
            free.wait()

    with streaming_server(read) as url, Stream(url, newcomers=True) as newcomer:
        started = time.monotonic()
        begun.set()
        held.wait()
        arrived = time.monotonic()
        time.sleep(0.2)
        waited = time.monotonic() - arrived
        free.set()
        assert newcomer.longest_gap(started, time.monotonic()) >= waited
    prompts = [body["prompt"] for body in bodies]
    assert len({*prompts}) == len(prompts) > 1
    assert {body["max_tokens"] for body in bodies} == {1}


def test_a_displaced_prompt_is_sent_again_after_another_one() -> None:
    (case,) = [case for case in CASES if case.displaced]
    bodies: list[dict[str, Any]] = []
    with streaming_server(bodies.append) as url:
        assert Measure(Endpoint("fake", url), seconds=5).case(case)["answer"] == "200"
    first, other, again = [body["prompt"] for body in bodies if not body.get("stream")]
    assert first == again != other
