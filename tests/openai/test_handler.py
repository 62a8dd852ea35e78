"""The handler with continuous batching, called by a fake of TorchServe's front end that enforces the protocol."""

from __future__ import annotations

import gc
import json
import re
import socket
import sys
import threading
import time
from importlib import import_module
from itertools import chain, count, cycle, repeat
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from constraints import Alternating, AlternatingGrammars
from fake_engine import FakeVocabulary
from front_end import SLOTS, FakeContext, FrontEnd
from specserve.api import parser, routes
from specserve.api.openapi import openapi
from specserve.api.response import ChoicesResponse, GenerationResponse
from specserve.api.routes import Routes
from specserve.core.generation import Generation
from specserve.core.scheduler import Scheduler
from specserve.observability.metrics import Metrics
from specserve.torchserve import handler as torchserve


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
USAGE = {"include_usage": True}


def test_a_completion_is_openais_object_with_usage_and_speculation(front_end: FrontEnd) -> None:
    request_id = front_end.post(BODY)
    front_end.run()
    answer = front_end.answer(request_id)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["total_tokens"] == 5 + usage["completion_tokens"]
    statistics = answer["speculation"]
    assert statistics["rounds"] > 0
    assert statistics["drafted_tokens"] >= statistics["accepted_tokens"] > 0
    assert front_end.content_type[request_id] == "application/json"


def test_a_stream_has_the_text_of_the_whole_response(front_end: FrontEnd) -> None:
    whole, stream = front_end.post(BODY), front_end.post({**BODY, "stream": True})
    front_end.run()
    events = front_end.events(stream)
    assert "".join(e["choices"][0]["text"] for e in events) == front_end.answer(whole)["choices"][0]["text"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["finish_reason"]
    assert all("usage" not in event for event in events)
    assert front_end.content_type[stream] == "text/event-stream"


def test_the_first_chunk_carries_the_first_text(front_end: FrontEnd) -> None:
    stream = front_end.post({**BODY, "stream": True})
    front_end.handle_once()
    assert '"text": "' in front_end.chunks[stream][0]


def test_wall_clock_jumps_change_no_text_and_no_measured_seconds(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = front_end.post(BODY)
    front_end.run()
    hours = cycle((3600.0, -7200.0, 86_400.0))
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(hours))
    started = time.monotonic()
    whole, stream = front_end.post(BODY), front_end.post({**BODY, "stream": True, "stream_options": USAGE})
    front_end.run()
    text = front_end.answer(before)["choices"][0]["text"]
    answer, events = front_end.answer(whole), front_end.events(stream)
    assert answer["choices"][0]["text"] == text
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert abs(answer["created"] - 1e9) <= 86_400
    assert len({event["created"] for event in events}) == 1
    for statistics in (answer["speculation"], events[-1]["speculation"]):
        measured = [seconds for name, seconds in statistics["seconds"].items() if name != "plain_estimate"]
        assert min(measured) >= 0
        assert sum(measured) < time.monotonic() - started


def test_streams_continue_while_a_request_is_parsed(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt blocks the tokenizer until the test sets an event; a second request waits."""
    monkeypatch.setattr(parser, "_PARSE_SECONDS", 0.01)
    stream = front_end.post({**BODY, "stream": True, "max_tokens": 40})
    front_end.handle_once()
    release, tokenized = threading.Event(), []
    encode = FakeVocabulary.encode

    def slow(vocabulary: FakeVocabulary, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        tokenized.append(text)
        assert text != "slow" or release.wait(10)
        return encode(vocabulary, text, special=special, begin=begin)

    monkeypatch.setattr(FakeVocabulary, "encode", slow)
    others = [front_end.post({**BODY, "prompt": text}) for text in ("slow", "quick")]
    models = front_end.post({}, "v1/models")
    lengths = []
    for _ in range(3):
        front_end.handle_once()
        lengths.append(len(front_end.text(stream)))
    assert lengths == sorted(set(lengths))
    assert front_end.status[models] == 200
    assert not any(front_end.chunks[other] for other in others)
    release.set()
    front_end.run()
    assert all(front_end.status[other] == 200 for other in others)
    assert tokenized == ["slow", "quick"]


def test_nothing_of_a_finished_sequence_is_kept_but_its_cached_tokens(front_end: FrontEnd) -> None:
    prompt = "the prompt of this test"
    body = {**BODY, "prompt": prompt, "grammar": "root", "logprobs": 5}
    front_end.post({**body, "prediction": {"type": "content", "content": "what may be"}, "echo": True})
    cancelled = front_end.post({**body, "stream": True, "max_tokens": 100})
    front_end.handle_once()
    front_end.disconnect(cancelled)
    front_end.run()
    front_end.handle_once()
    gc.collect()
    prompt_tokens = list(prompt.encode())
    kept = [thing for thing in gc.get_objects() if isinstance(thing, Generation) and thing.prompt == prompt_tokens]
    assert not kept
    again = front_end.post(body)
    front_end.run()
    assert front_end.answer(again)["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt_tokens) - 1


def test_usage_counts_tokens_that_came_back_from_host_memory(front_end: FrontEnd) -> None:
    """Other requests use all slots meanwhile. Blocks of 32 tokens come back; a token is a byte here."""
    body = {**BODY, "prompt": "A long conversation, which returns. " * 3}
    answers = []
    for others in (SLOTS, 0):
        request_id = front_end.post(body)
        front_end.run()
        answers.append(front_end.answer(request_id))
        for number in range(others):
            front_end.post({**BODY, "prompt": f"{number}: something else, which is as long as that. " * 3})
        front_end.run()
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 96]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_include_usage_adds_null_to_every_chunk_and_one_chunk_with_the_totals(front_end: FrontEnd) -> None:
    stream = front_end.post({**BODY, "stream": True, "stream_options": USAGE})
    front_end.run()
    *chunks, last = front_end.events(stream)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert last["speculation"]["rounds"] > 0


def test_continuous_usage_is_in_every_chunk_and_grows_to_the_totals(front_end: FrontEnd) -> None:
    options = {**USAGE, "continuous_usage_stats": True}
    stream = front_end.post({**BODY, "stream": True, "stream_options": options})
    front_end.run()
    usages = [chunk["usage"] for chunk in front_end.events(stream)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert len(set(counts)) > 2
    assert counts == sorted(counts)
    assert usages[-1] == usages[-2]
    assert {usage["prompt_tokens"] for usage in usages} == {len("hello")}


def test_continuous_usage_needs_usage_as_in_vllm(front_end: FrontEnd) -> None:
    stream = front_end.post({**BODY, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    front_end.run()
    assert not any("usage" in chunk for chunk in front_end.events(stream))


def test_echo_puts_the_prompt_before_the_output(front_end: FrontEnd) -> None:
    plain, echo = front_end.post(BODY), front_end.post({**BODY, "echo": True})
    tokens = front_end.post({**BODY, "prompt": [104, 105], "echo": True, "max_tokens": 0})
    front_end.run()
    text = front_end.answer(plain)["choices"][0]["text"]
    assert front_end.answer(echo)["choices"][0]["text"] == "hello" + text
    assert front_end.answer(tokens)["choices"][0]["text"] == "hi"


def test_more_whole_and_streamed_requests_than_slots_all_finish(front_end: FrontEnd) -> None:
    request_ids = [front_end.post({**BODY, "stream": i % 2 == 0, "prompt": f"p{i}"}) for i in range(3 * SLOTS)]
    front_end.run()
    assert set(request_ids) <= front_end.finished


def test_an_invalid_request_is_refused_at_once_and_others_continue(front_end: FrontEnd) -> None:
    valid = front_end.post(BODY)
    invalid = front_end.post({**BODY, "temperature": 9})
    front_end.handle_once()
    assert front_end.status[invalid] == 400
    assert front_end.answer(invalid)["error"]["param"] == "temperature"
    front_end.run()
    assert front_end.status[valid] == 200


@pytest.mark.parametrize("route", ["", None, "v1/completions", "/v1/completions/"])
def test_the_model_url_without_a_route_serves_completions(front_end: FrontEnd, route: str | None) -> None:
    request_id = front_end.post(BODY, route)
    front_end.run()
    assert front_end.answer(request_id)["object"] == "text_completion"


def test_every_route_of_the_openapi_document_is_served_and_listed_by_a_404(front_end: FrontEnd) -> None:
    listed = [path.removeprefix("/") for path in openapi()["paths"]]
    assert len(listed) == 10
    answered = [front_end.post({}, path.format(id="qwen")) for path in listed]
    unknown = front_end.post({}, "v1/edits")
    front_end.run()
    assert {front_end.status[request_id] for request_id in answered} == {200, 400}
    message = front_end.answer(unknown)["error"]["message"]
    assert all(path in message for path in listed if "{" not in path)


def test_models_are_listed_and_retrieved(front_end: FrontEnd) -> None:
    models, one = front_end.post(None, "v1/models"), front_end.post(None, "v1/models/qwen")
    none = front_end.post(None, "v1/models/gpt-4")
    front_end.run()
    assert [m["id"] for m in front_end.answer(models)["data"]] == ["tiny", "qwen"]
    assert front_end.answer(one)["id"] == "qwen"
    assert front_end.answer(one)["max_model_len"] == 256
    assert front_end.status[none] == 404
    assert front_end.answer(none)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("length", [400, 1_000_000])
@pytest.mark.parametrize(
    ("route", "field"),
    [("v1/completions", "prompt"), ("v1/chat/completions", "messages"), ("v1/responses", "input")],
)
def test_a_prompt_that_is_too_long_is_refused_in_openais_words(
    front_end: FrontEnd, route: str, field: str, length: int
) -> None:
    """Agents shorten the conversation when they read them, and send it again otherwise."""
    text = "x" * length
    refused = front_end.post({field: [{"role": "user", "content": text}] if field == "messages" else text}, route)
    front_end.run()
    assert front_end.status[refused] == 400
    error = front_end.answer(refused)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    # LiteLLM looks for the first words, opencode for the number too, Cline for two of them, Continue for the last ones.
    words = (
        r"This model's maximum context length is 256 tokens\. However, your (\w+) resulted in (at least )?\d+ tokens\. "
    )
    assert re.fullmatch(words + r"Please reduce the length of the \1\.", error["message"])


def test_an_unknown_model_or_route_is_a_404(front_end: FrontEnd) -> None:
    model, route = front_end.post({**BODY, "model": "gpt-4"}), front_end.post(BODY, "v1/edits")
    front_end.run()
    assert (front_end.status[model], front_end.answer(model)["error"]["param"]) == (404, "model")
    assert (front_end.status[route], front_end.answer(route)["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    "route", ["v1/embeddings", "embeddings", "v1/rerank", "v1/audio/speech", "v1/images/generations", "v1/score"]
)
def test_a_route_for_another_kind_of_model_is_a_404_that_says_what_to_run(front_end: FrontEnd, route: str) -> None:
    refused = front_end.post({"input": "hello", "model": "tiny"}, route)
    front_end.run()
    error = front_end.answer(refused)["error"]
    assert (front_end.status[refused], error["code"]) == (404, "unknown_url")
    assert "generates text only" in error["message"]
    assert "llama-server --embeddings" in error["message"]


def test_a_disconnect_frees_the_requests_slot(front_end: FrontEnd) -> None:
    cancelled = [front_end.post({**BODY, "max_tokens": 200, "stream": True, "seed": i}) for i in range(SLOTS)]
    front_end.handle_once()
    front_end.handle_once()
    for request_id in cancelled:
        front_end.disconnect(request_id)
    after = front_end.post(BODY)
    front_end.handle_once()
    assert sum(front_end.sequences()) == 1
    front_end.run()
    assert front_end.status[after] == 200


def test_rounds_run_between_calls_and_all_other_work_between_rounds(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_round, rounds, overlapping = threading.Event(), [], []
    run_round = Scheduler.run_round

    def slow_round(scheduler: Scheduler) -> None:
        rounds.append(scheduler)
        in_round.set()
        time.sleep(0.002)
        run_round(scheduler)
        in_round.clear()

    def between_rounds(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def checked(*arguments: object) -> object:
            # By then a round that was started too early is running.
            time.sleep(0.001)
            if in_round.is_set():
                overlapping.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, checked)

    monkeypatch.setattr(Scheduler, "run_round", slow_round)
    for owner, name in (
        (Scheduler, "submit"),
        (Scheduler, "cancel"),
        (GenerationResponse, "next_events"),
        (GenerationResponse, "text"),
        (Metrics, "emit"),
        (Routes, "_speculation"),
    ):
        between_rounds(owner, name)
    front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.handle_once()
    assert len(rounds) == 2, "one in the call, and one that it has started"
    front_end.waits_for_slice = False
    for _ in range(3):
        cancelled = front_end.post({**BODY, "max_tokens": 100, "stream": True})
        front_end.post(None, "v1/speculation")
        front_end.handle_once()
        front_end.handle_once()
        front_end.disconnect(cancelled)
    front_end.run()
    assert not overlapping


def test_a_new_request_interrupts_a_long_time_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time slice has one round; the clock stops for the next one, so that only an interrupt can end it."""
    front_end = FrontEnd(time_slice_ms=500)
    started, posted, rounds = threading.Event(), threading.Event(), count()
    clock, run_round = chain([0.0], repeat(1.0)), Scheduler.run_round

    def announced_round(scheduler: Scheduler) -> None:
        """A round, but no more than 50 before the second request: the answer of 200 tokens cannot end earlier."""
        if posted.is_set() or next(rounds) < 50:
            run_round(scheduler)
        started.set()

    monkeypatch.setattr(Scheduler, "run_round", announced_round)
    monkeypatch.setattr("specserve.core.engine_loop.time", SimpleNamespace(monotonic=lambda: next(clock)))
    long = front_end.post({**BODY, "max_tokens": 200, "ignore_eos": True, "speculation": {"mode": "off"}})
    front_end.waits_for_slice = False
    front_end.handle_once()
    started.clear()
    assert started.wait(10)
    front_end.post(BODY)
    front_end.handle_once()
    assert long not in front_end.finished
    posted.set()
    front_end.run()


def test_a_streams_status_waits_for_its_first_event(front_end: FrontEnd) -> None:
    """So an error before that has a status of its own."""
    front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.handle_once()
    failing = front_end.post({**BODY, "prompt": "abc" * 60, "stream": True})
    for _ in range(3):
        front_end.handle_once()
    assert not front_end.chunks[failing]
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.status[failing] == 500


@pytest.mark.parametrize(("seconds", "chunks"), [(60.0, set()), (0.0, {": \n\n", ""})])
def test_a_queued_stream_gets_its_status_at_the_deadline(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, seconds: float, chunks: set[str]
) -> None:
    monkeypatch.setattr(torchserve, "_STREAM_STATUS_SECONDS", seconds)
    for _ in range(20):
        front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.handle_once()
    waiting = front_end.post({**BODY, "stream": True})
    for _ in range(3):
        front_end.handle_once()
    assert set(front_end.chunks[waiting]) == chunks
    front_end.run()
    assert front_end.status[waiting] == 200
    assert front_end.events(waiting)


class Clock:
    """Stands in for `time` in torchserve.py; a call of handle() takes two seconds and a half."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("route", "extra", "sign"),
    [
        ("v1/completions", {"stream": True}, ": \n\n"),
        ("v1/chat/completions", {"stream": True}, ": \n\n"),
        ("v1/responses", {"stream": True}, ": \n\n"),
        ("v1/messages", {"stream": True}, 'event: ping\ndata: {"type": "ping"}\n\n'),
        ("v1/chat/completions", {}, " "),
        ("v1/messages", {}, " "),
    ],
)
def test_a_request_that_waits_hears_something_every_ten_seconds(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, route: str, extra: dict[str, Any], sign: str
) -> None:
    prompts: dict[str, dict[str, Any]] = {
        "v1/completions": {"prompt": "hello"},
        "v1/responses": {"input": "hello"},
    }
    limit = "max_output_tokens" if route == "v1/responses" else "max_tokens"
    clock = Clock()
    monkeypatch.setattr(torchserve, "time", clock)
    for _ in range(SLOTS):
        front_end.post({**BODY, "max_tokens": 240, "ignore_eos": True, "speculation": {"mode": "off"}})
    front_end.handle_once()
    body = prompts.get(route, {"messages": [{"role": "user", "content": "hello"}]})
    waiting = front_end.post({**body, limit: 4, **extra}, route)
    for _ in range(19):
        front_end.handle_once()
        clock.now += 2.5
    # After 2.5, 12.5, 22.5, 32.5 and 42.5 seconds; empty chunks between them.
    assert front_end.chunks[waiting] == ([sign, "", "", ""] * 5)[:18]
    front_end.run()
    assert front_end.status[waiting] == 200
    text = front_end.text(waiting)
    if not extra:
        assert json.loads(text)["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_that_speaks_sends_no_signs_of_life(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(torchserve, "time", clock)
    request_id = front_end.post({**BODY, "max_tokens": 60, "ignore_eos": True, "stream": stream})
    while request_id in front_end.rows:
        front_end.handle_once()
        clock.now += 9.0 if stream else 0.01
    assert ": \n\n" not in front_end.text(request_id)
    assert not front_end.text(request_id).startswith(" ")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
def test_a_disconnect_from_a_long_whole_response_is_noticed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """After the status deadline empty chunks let TorchServe notice it, and it stops sending the request body."""
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    whole = front_end.post({**BODY, "max_tokens": 50, **fields})
    front_end.handle_once()
    assert front_end.chunks[whole] == [" "]
    assert front_end.rows[whole] == {}
    front_end.run()
    assert (front_end.status[whole], front_end.content_type[whole]) == (200, "application/json")
    assert front_end.answer(whole)["usage"]["completion_tokens"] <= 50
    cancelled = front_end.post({**BODY, "max_tokens": 200, "ignore_eos": not fields, **fields})
    front_end.handle_once()
    front_end.disconnect(cancelled)
    # It is noticed with the next chunk.
    front_end.handle_once()
    assert front_end.sequences() == (0, 0)


def test_torchserve_passes_json_bodies_to_the_handler_unparsed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This calls TorchServe's own decoder of requests, which reads the environment for every body."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    decoder = import_module("ts.protocol.otf_message_handler")
    name, kind, body = b"body", b"application/json", json.dumps(BODY).encode()
    frame = b"".join(len(part).to_bytes(4, "big") + part for part in (name, kind, body))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame)
        decoded = decoder._retrieve_input_data(theirs)
    assert bytes(decoded["value"]) == body
    request_id = front_end.post(decoded["value"])
    front_end.run()
    assert front_end.status[request_id] == 200


def test_a_long_body_is_sent_to_the_handler_once(front_end: FrontEnd) -> None:
    long = front_end.post({**BODY, "max_tokens": 50, "user": "x" * 100_000})
    short = front_end.post({**BODY, "max_tokens": 50, "user": "x" * 1_000})
    front_end.handle_once()
    assert (front_end.chunks[long], front_end.chunks[short]) == ([" "], [])
    assert (front_end.rows[long], len(front_end.rows[short])) == ({}, 1)
    front_end.run()
    assert front_end.answer(long)["usage"]["completion_tokens"] > 0
    refused = front_end.post({**BODY, "prompt": "x" * 100_000})
    front_end.run()
    assert front_end.status[refused] == 400


def block_tokenizer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every text wait for the event, at most ten seconds, before it is tokenized."""
    release, encode = threading.Event(), FakeVocabulary.encode

    def blocked(vocabulary: FakeVocabulary, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        assert release.wait(10)
        return encode(vocabulary, text, special=special, begin=begin)

    monkeypatch.setattr(FakeVocabulary, "encode", blocked)
    return release


def test_streams_wait_once_for_a_long_parse_whatever_comes_behind_it(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    front_end.post({**BODY, "stream": True, "max_tokens": 40})
    front_end.handle_once()
    release = block_tokenizer(monkeypatch)
    monkeypatch.setattr(parser, "wait", lambda _futures, seconds: waits.append(seconds))
    for _ in range(3):
        front_end.post(BODY)
        front_end.handle_once()
    assert waits == [parser._PARSE_SECONDS, 0.0, 0.0]
    release.set()
    monkeypatch.undo()
    front_end.run()


def test_long_bodies_are_refused_while_too_many_bytes_wait_to_be_parsed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first blocks the tokenizer until the test sets an event. Short bodies, and one alone, are always accepted."""
    monkeypatch.setattr(parser, "_PARSE_SECONDS", 0.01)
    monkeypatch.setattr(parser, "_MAX_WAITING_BYTES", 300_000)
    release = block_tokenizer(monkeypatch)
    lengths = (150_000, 100_000, 100_000, 50_000)
    first, second, refused, short = (front_end.post({**BODY, "user": "x" * length}) for length in lengths)
    front_end.handle_once()
    assert front_end.status == {refused: 503}
    assert "send this one again" in front_end.answer(refused)["error"]["message"]
    release.set()
    front_end.run()
    assert [front_end.status[request_id] for request_id in (first, second, short)] == [200, 200, 200]
    again = front_end.post({**BODY, "user": "x" * 400_000})
    front_end.run()
    assert front_end.status[again] == 200


def test_a_grammar_that_becomes_too_costly_after_the_status_is_an_error_object(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(AlternatingGrammars, "gbnf", lambda _grammars, text: Alternating(200, fails_at=len(text)))
    late = front_end.post({**BODY, "max_tokens": 60, "grammar": "r" * 40, "speculation": {"mode": "off"}})
    front_end.handle_once()
    assert front_end.chunks[late] == [" "]
    front_end.run()
    assert (front_end.status[late], front_end.answer(late)["error"]["code"]) == (200, "grammar_too_costly")


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_request_that_forbids_every_token_is_told_so_and_no_other_suffers(front_end: FrontEnd, mode: str) -> None:
    odd = [[token, False] for token in range(1, 200, 2)]
    nothing = {"grammar": "r" * 9, "logit_bias": odd}
    refused = front_end.post({**BODY, **nothing, "speculation": {"mode": mode}})
    other = front_end.post(BODY)
    front_end.run()
    error = front_end.answer(refused)["error"]
    assert (front_end.status[refused], error["code"]) == (400, "invalid_value")
    assert error["message"] == "The request allows no token that could follow."
    assert front_end.status[other] == 200


def test_a_short_whole_response_is_sent_in_one_reply(front_end: FrontEnd) -> None:
    request_id = front_end.post({**BODY, "max_tokens": 50})
    front_end.run()
    assert len(front_end.chunks[request_id]) == 1


def test_a_failure_after_the_status_is_an_error_object(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    request_id = front_end.post({**BODY, "max_tokens": 50})
    front_end.handle_once()
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.answer(request_id)["error"]["type"] == "server_error"


def test_a_model_failure_is_a_500_or_an_error_event_and_the_next_request_is_served(
    front_end: FrontEnd,
) -> None:
    endless = {**BODY, "max_tokens": 100, "ignore_eos": True}
    whole, stream = front_end.post(endless), front_end.post({**endless, "stream": True})
    while not any(front_end.chunks[stream]):
        front_end.handle_once()
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.status[whole] == 500
    assert front_end.answer(whole)["error"]["type"] == "server_error"
    assert front_end.events(stream)[-1]["error"]["type"] == "server_error"
    after = front_end.post(BODY)
    front_end.run()
    assert front_end.status[after] == 200


class Panic(BaseException):
    """As the panics of llguidance, which is written in Rust."""


@pytest.mark.parametrize("error", [KeyError("gone"), Panic("index out of bounds")])
@pytest.mark.parametrize("stream_first", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (routes, "parse_body"),
        (Scheduler, "submit"),
        (Scheduler, "cancel"),
        (ChoicesResponse, "_new"),
        (GenerationResponse, "_totals"),
        (FakeContext, "get_all_request_header"),
        (FakeContext, "set_response_content_type"),
    ],
)
def test_what_one_request_raises_fails_that_request_alone(
    front_end: FrontEnd,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: BaseException,
    *,
    stream_first: bool,
) -> None:
    original = getattr(owner, name)
    errors = [error]

    def failing(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    body = {**BODY, "max_tokens": 20}
    requests = [
        front_end.post({**body, "stream": True, "stream_options": USAGE} if stream else body)
        for stream in (stream_first, not stream_first)
    ]
    front_end.run()
    requests.append(front_end.post(body))
    front_end.run()
    failed = [request_id for request_id in requests if '"server_error"' in front_end.text(request_id)]
    assert len(failed) == 1
    for request_id in failed:
        if front_end.status[request_id] == 200:
            assert front_end.events(request_id)[-1]["error"]["message"].endswith("its log says why.")
        else:
            assert front_end.status[request_id] == 500
    assert len({text_of(front_end, request_id) for request_id in requests if request_id not in failed}) == 1


def text_of(front_end: FrontEnd, request_id: str) -> str:
    """The text of a completion, whole or streamed."""
    if front_end.content_type[request_id] == "application/json":
        return str(front_end.answer(request_id)["choices"][0]["text"])
    events = front_end.events(request_id)
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_failure_that_even_its_error_cannot_tell_ends_the_stream_alone(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [front_end.post({**BODY, "stream": True, "max_tokens": 40}) for _ in range(2)]
    front_end.handle_once()
    failing = front_end.handler._responses[streams[0]]
    monkeypatch.setattr(failing, "next_events", lambda: pytest.fail("as always"))
    front_end.run()
    assert "[DONE]" not in front_end.text(streams[0])
    assert front_end.events(streams[1])[-1]["choices"][0]["finish_reason"]


def test_a_panic_in_a_round_fails_its_sequences_and_the_next_request_is_served(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(_scheduler: Scheduler) -> None:
        monkeypatch.undo()
        raise Panic("index out of bounds")

    failed = front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.handle_once()
    monkeypatch.setattr(Scheduler, "run_round", panic)
    front_end.run()
    assert front_end.status[failed] == 500
    after = front_end.post(BODY)
    front_end.run()
    assert front_end.status[after] == 200


def test_metrics_that_cannot_be_sent_are_logged_once_and_fail_nobody(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Metrics, "emit", lambda _metrics: None)  # a TypeError
    request_id = front_end.post({**BODY, "max_tokens": 60})
    front_end.run()
    assert front_end.status[request_id] == 200
    assert [record.message for record in caplog.records if record.exc_info] == [
        "specserve: metrics cannot be sent; this is not logged again"
    ]


@pytest.mark.parametrize("name", ["authorization", "Authorization", "x-api-key", "url_path", "explain", "host", ""])
@pytest.mark.parametrize("route", [None, "v1/chat/completions"])
def test_parts_of_a_form_are_no_headers(front_end: FrontEnd, name: str, route: str | None) -> None:
    other = front_end.post(BODY)
    headers = {"Host": "127.0.0.1"} | ({} if route is None else {"url_path": route, "explain": "False"})
    form = front_end.send({name: b"x"}, headers)
    front_end.run()
    assert (front_end.status[form], front_end.status[other]) == (400, 200)
    assert "application/json" in front_end.answer(form)["error"]["message"]


@pytest.mark.parametrize("headers", [{}, {"ts_request_sequence_id": "1", "ts_request_sequence_end": "true"}])
@pytest.mark.parametrize("parts", [{"body": json.dumps(BODY).encode()}, {"authorization": b"x"}, {}])
def test_a_request_by_grpc_is_refused_with_one_last_chunk(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, parts: dict[str, bytes], headers: dict[str, str]
) -> None:
    """TorchServe's streaming calls end with a last chunk only, which no call by HTTP begins with."""
    refused = front_end.send(parts, headers)
    monkeypatch.setattr(front_end, "chunks", {refused: ["as by HTTP"]})
    front_end.run()
    _, chunk = front_end.chunks[refused]
    assert "HTTP" in json.loads(chunk)["error"]["message"]


@pytest.mark.parametrize("body", [bytearray(b"{"), b"", "text", [1], 5])
def test_a_body_that_is_not_an_object_is_a_400(front_end: FrontEnd, body: object) -> None:
    request_id = front_end.post(body)
    front_end.run()
    assert front_end.status[request_id] == 400


def test_a_body_with_too_many_brackets_is_refused_before_it_is_parsed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda _body: pytest.fail("it is parsed"))
    request_id = front_end.post(json.dumps({"prompt": [[]] * 70_000}).encode())
    front_end.run()
    monkeypatch.undo()
    assert front_end.status[request_id] == 400
    assert "opening brackets" in front_end.answer(request_id)["error"]["message"]


def test_the_error_of_a_missing_body_says_how_to_send_one(front_end: FrontEnd) -> None:
    request_id = front_end.post(None)
    front_end.run()
    assert "application/json" in front_end.answer(request_id)["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


def test_a_chat_is_the_completion_of_its_rendered_messages(front_end: FrontEnd) -> None:
    chat = front_end.post(CHAT, "v1/chat/completions")
    completion = front_end.post({**BODY, "prompt": "user: hello\nassistant: "})
    front_end.run()
    answer = front_end.answer(chat)
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == front_end.answer(completion)["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 12


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_finish_reason(front_end: FrontEnd) -> None:
    whole, stream = (front_end.post({**CHAT, "stream": s}, "v1/chat/completions") for s in (False, True))
    front_end.run()
    events = front_end.events(stream)
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    content = front_end.answer(whole)["choices"][0]["message"]["content"]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_without_a_chat_template_is_an_error_that_says_so() -> None:
    front_end = FrontEnd(chat_template=None)
    chat = front_end.post(CHAT, "v1/chat/completions")
    front_end.run()
    assert "no chat template" in front_end.answer(chat)["error"]["message"]


def test_the_holdback_speedup_is_reset_when_the_draft_model_fails() -> None:
    """Of 150 requests each group has the 30 that it needs, except with probability 1 in 40,000."""
    front_end = FrontEnd(holdback=0.5)
    for _ in range(150):
        front_end.post({**BODY, "max_tokens": 2})
    front_end.run()
    assert front_end.speculation_status()["holdback"]
    front_end.draft.fail_after = 0
    front_end.post({**BODY, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}})
    front_end.run()
    assert front_end.speculation_status()["holdback"] is None


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (("key", None), ("key", None), True),
        (("key", None), ("other", None), False),
        (("key", "a"), ("key", "a"), True),
        (("key", "a"), ("key", "b"), False),
        (("key", "a"), ("other", "a"), False),
        (("key", ""), ("key", ""), False),
        (("", None), ("", None), True),
        (("", None), ("key", None), False),
    ],
)
def test_lookups_find_what_answers_to_the_same_key_and_pool_wrote(
    front_end: FrontEnd, first: tuple[str, str | None], second: tuple[str, str | None], *, is_shared: bool
) -> None:
    accepted = []
    for key, pool in (first, second):
        speculation = {"mode": "fixed", "gamma": 8, "drafter": "lookup"} | ({} if pool is None else {"pool": pool})
        body = {**BODY, "prompt": "abcd", "max_tokens": 60, "ignore_eos": True, "speculation": speculation}
        request = front_end.post(body, key=key)
        front_end.run()
        accepted.append(front_end.answer(request)["speculation"]["accepted_tokens"])
    alone, after = accepted
    assert (after > alone) == is_shared


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ({"authorization": "Bearer a"}, True),
        ({"AUTHORIZATION": "Bearer a"}, True),
        ({"Authorization": "Bearer a", "X-Api-Key": "b"}, True),
        ({"Authorization": "Bearer b"}, False),
        ({"x-api-key": "Bearer a"}, True),
        ({"X-API-Key": "b"}, False),
        ({"Authorization": "Bearer a", "authorization": "Bearer b"}, False),
        ({}, False),
    ],
)
def test_a_client_is_known_by_its_key_however_the_header_is_spelt(
    front_end: FrontEnd, headers: dict[str, str], *, same: bool
) -> None:
    """Two different keys in one request are a key of their own, so nobody becomes another by a second header."""
    speculation = {"mode": "fixed", "gamma": 8, "drafter": "lookup"}
    body = {**BODY, "prompt": "abcd", "max_tokens": 60, "ignore_eos": True, "speculation": speculation}
    accepted = []
    for sent in ({"Authorization": "Bearer a"}, headers):
        request = front_end.post(body, headers=sent)
        front_end.run()
        accepted.append(front_end.answer(request)["speculation"]["accepted_tokens"])
    assert (accepted[1] > accepted[0]) == same


@pytest.mark.parametrize("route", ["v1/completions", "v1/chat/completions", "v1/responses", "v1/messages"])
def test_a_cache_salt_separates_prefixes_on_every_route(front_end: FrontEnd, route: str) -> None:
    text = "one prompt that is long enough to be found again " * 2
    fields: dict[str, Any] = {
        "v1/completions": {"prompt": text, "max_tokens": 2},
        "v1/responses": {"input": text, "max_output_tokens": 2},
    }.get(route, {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "model": "tiny"})
    cached = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {}):
        request = front_end.post({**fields, **salt}, route)
        front_end.run()
        usage = front_end.answer(request)["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached.append(details["cached_tokens"] if details else usage["cache_read_input_tokens"])
    assert [number > 50 for number in cached] == [False, False, True, True]
    assert cached[1] == 0
