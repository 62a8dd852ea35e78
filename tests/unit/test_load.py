"""benchmarks/load.py: short prompts come during the prefill of a long one, and their waits are held against a bound."""

import threading
from collections import defaultdict
from typing import Any

from load import LENGTHS, LONG, SHORT_ALONE, Seconds, mixed_rows, mixed_turn
from servers import Endpoint
from streaming_server import streaming_server

# Short prompts that are answered during each prefill of a long one.
BESIDE = 3


def test_short_prompts_of_each_kind_come_while_a_long_one_is_read() -> None:
    short: list[str] = []
    long: list[str] = []
    arrival = threading.Condition()

    def read(body: dict[str, Any]) -> None:
        is_long = len(body["prompt"].split()) > LENGTHS[LONG] / 2
        with arrival:
            (long if is_long else short).append(body["prompt"])
            arrival.notify_all()
            # The first long one comes alone.
            awaited = len(short) + BESIDE * (is_long and len(long) > 1)
            arrival.wait_for(lambda: len(short) >= awaited, timeout=10)

    seconds: Seconds = defaultdict(list)
    with streaming_server(read) as url:
        mixed_turn(Endpoint("fake", url), seconds)
    for prompt in LENGTHS.keys() - {LONG}:
        assert len(seconds[prompt, "alone"]) == SHORT_ALONE
        assert len(seconds[prompt, "beside"]) >= BESIDE
    assert (len(seconds[LONG, "alone"]), len(seconds[LONG, "beside"])) == (1, 2)
    assert len({*short, *long}) == len(short + long), "a prompt was sent twice, so it may have been cached"


def test_bounds_are_three_times_alone_and_a_chunk_and_for_long_prompts_a_factor() -> None:
    seconds: Seconds = {(prompt, "alone"): [0.1] for prompt in LENGTHS} | {(LONG, "alone"): [LENGTHS[LONG] / 1000]}
    # A chunk of 64 tokens takes 0.064 s.
    seconds |= {(prompt, "beside"): [0.2, 0.36, 0.37] for prompt in LENGTHS} | {(LONG, "beside"): [5.0, 5.1]}
    chat, completion, long = mixed_rows("fake", seconds, chunk=64)
    assert (chat["bound_s"], chat["within_bound"], chat["requests"], chat["ratio"]) == (0.364, 2, 3, 3.6)
    assert completion["bound_s"] == 0.364
    assert (long["bound_s"], long["within_bound"], long["requests"]) == (5.07, 1, 2)
