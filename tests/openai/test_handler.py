"""The handler with continuous batching, and a stand-in for TorchServe's front end that enforces its protocol."""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
import time
from importlib import import_module
from itertools import chain, cycle, repeat
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from constraints import Alternating, AlternatingGrammars
from fake_engine import FakeVocabulary
from front_end import SLOTS, FrontEnd
from specserve.observability.metrics import Metrics
from specserve.serving import torchserve
from specserve.serving.generation import Generation
from specserve.serving.openai.openapi import openapi
from specserve.serving.openai.response import GenerationResponse
from specserve.serving.routes import Routes
from specserve.serving.scheduler import Scheduler


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
USAGE = {"include_usage": True}


def test_a_completion_is_openais_object_with_usage_and_speculation(front_end: FrontEnd) -> None:
    identity = front_end.post(BODY)
    front_end.run()
    answer = front_end.answer(identity)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["total_tokens"] == 5 + usage["completion_tokens"]
    account = answer["speculation"]
    assert account["rounds"] > 0
    assert account["drafted_tokens"] >= account["accepted_tokens"] > 0
    assert front_end.content_type[identity] == "application/json"


def test_a_stream_has_the_same_text_in_chunks(front_end: FrontEnd) -> None:
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
    front_end.turn()
    assert '"text": "' in front_end.chunks[stream][0]


def test_a_clock_that_jumps_changes_no_text_and_no_seconds(
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
    for account in (answer["speculation"], events[-1]["speculation"]):
        taken = [seconds for name, seconds in account["seconds"].items() if name != "plain_estimate"]
        assert min(taken) >= 0
        assert sum(taken) < time.monotonic() - started


def test_streams_go_on_while_a_request_takes_long_to_parse(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is tokenized until the test lets go; a second request waits for that, and a third is cancelled."""
    monkeypatch.setattr(torchserve, "_PARSE_SECONDS", 0.01)
    stream = front_end.post({**BODY, "stream": True, "max_tokens": 40})
    front_end.turn()
    may, tokenized = threading.Event(), []
    encode = FakeVocabulary.encode

    def slow(vocabulary: FakeVocabulary, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        tokenized.append(text)
        assert text != "slow" or may.wait(10)
        return encode(vocabulary, text, special=special, begin=begin)

    monkeypatch.setattr(FakeVocabulary, "encode", slow)
    others = [front_end.post({**BODY, "prompt": text}) for text in ("slow", "quick")]
    leaving = front_end.post({**BODY, "prompt": "leaving"})
    models = front_end.post({}, "v1/models")
    pieces = []
    for _ in range(3):
        front_end.turn()
        pieces.append(len(front_end.text(stream)))
    assert pieces == sorted(set(pieces))
    assert front_end.status[models] == 200
    assert not any(front_end.chunks[other] for other in others)
    front_end.leave(leaving)
    may.set()
    front_end.run()
    assert all(front_end.status[other] == 200 for other in others)
    assert tokenized == ["slow", "quick"]


def test_a_slot_keeps_only_the_tokens_of_a_finished_sequence(front_end: FrontEnd) -> None:
    prompt = "the prompt of this test"
    body = {**BODY, "prompt": prompt, "grammar": "root", "logprobs": 5}
    front_end.post({**body, "prediction": {"type": "content", "content": "what may be"}, "echo": True})
    leaving = front_end.post(body)
    front_end.turn()
    front_end.leave(leaving)
    front_end.run()
    front_end.turn()
    gc.collect()
    held = [one for one in gc.get_objects() if isinstance(one, Generation) and one.prompt == list(prompt.encode())]
    assert held
    for generation in held:
        assert generation.constraint is None
        assert len(generation.prediction) == len(generation.scores) == len(generation.prompt_scores) == 0
        assert not generation.has_text


def test_include_usage_adds_null_to_every_chunk_and_one_chunk_with_the_totals(front_end: FrontEnd) -> None:
    stream = front_end.post({**BODY, "stream": True, "stream_options": USAGE})
    front_end.run()
    *chunks, last = front_end.events(stream)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert last["speculation"]["rounds"] > 0


def test_echo_puts_the_prompt_before_the_text(front_end: FrontEnd) -> None:
    plain, echo = front_end.post(BODY), front_end.post({**BODY, "echo": True})
    tokens = front_end.post({**BODY, "prompt": [104, 105], "echo": True, "max_tokens": 0})
    front_end.run()
    text = front_end.answer(plain)["choices"][0]["text"]
    assert front_end.answer(echo)["choices"][0]["text"] == "hello" + text
    assert front_end.answer(tokens)["choices"][0]["text"] == "hi"


def test_many_requests_of_both_kinds_are_live_at_once(front_end: FrontEnd) -> None:
    identities = [front_end.post({**BODY, "stream": i % 2 == 0, "prompt": f"p{i}"}) for i in range(3 * SLOTS)]
    front_end.run()
    assert set(identities) <= front_end.finished


def test_a_bad_request_is_answered_alone_and_at_once(front_end: FrontEnd) -> None:
    good = front_end.post(BODY)
    bad = front_end.post({**BODY, "temperature": 9})
    front_end.turn()
    assert front_end.status[bad] == 400
    assert front_end.answer(bad)["error"]["param"] == "temperature"
    front_end.run()
    assert front_end.status[good] == 200


@pytest.mark.parametrize("route", ["", None, "v1/completions", "/v1/completions/"])
def test_the_bare_model_is_the_completions_route_too(front_end: FrontEnd, route: str | None) -> None:
    identity = front_end.post(BODY, route)
    front_end.run()
    assert front_end.answer(identity)["object"] == "text_completion"


def test_every_route_of_the_openapi_document_is_served_and_a_refusal_names_the_others(front_end: FrontEnd) -> None:
    listed = [path.removeprefix("/") for path in openapi()["paths"]]
    assert len(listed) == 6
    answered = [front_end.post({}, path.format(id="qwen")) for path in listed]
    unknown = front_end.post({}, "v1/edits")
    front_end.run()
    assert {front_end.status[identity] for identity in answered} == {200, 400}
    message = front_end.answer(unknown)["error"]["message"]
    assert all(path in message for path in listed if "{" not in path)


def test_models_are_listed_and_looked_up(front_end: FrontEnd) -> None:
    models, one = front_end.post(None, "v1/models"), front_end.post(None, "v1/models/qwen")
    none = front_end.post(None, "v1/models/gpt-4")
    front_end.run()
    assert [m["id"] for m in front_end.answer(models)["data"]] == ["tiny", "qwen"]
    assert front_end.answer(one)["id"] == "qwen"
    assert front_end.status[none] == 404
    assert front_end.answer(none)["error"]["code"] == "model_not_found"


def test_an_unknown_model_or_route_is_a_404(front_end: FrontEnd) -> None:
    model, route = front_end.post({**BODY, "model": "gpt-4"}), front_end.post(BODY, "v1/edits")
    front_end.run()
    assert (front_end.status[model], front_end.answer(model)["error"]["param"]) == (404, "model")
    assert (front_end.status[route], front_end.answer(route)["error"]["code"]) == (404, "unknown_url")


def test_a_cancelled_request_frees_its_slot(front_end: FrontEnd) -> None:
    leaving = [front_end.post({**BODY, "max_tokens": 200, "stream": True, "seed": i}) for i in range(SLOTS)]
    front_end.turn()
    front_end.turn()
    for identity in leaving:
        front_end.leave(identity)
    after = front_end.post(BODY)
    front_end.turn()
    assert sum(front_end.sequences()) == 1
    front_end.run()
    assert front_end.status[after] == 200


def test_rounds_run_between_calls_and_everything_else_between_rounds(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, rounds, wrong = threading.Event(), [], []
    step = Scheduler.step

    def slow_step(scheduler: Scheduler) -> None:
        rounds.append(scheduler)
        inside.set()
        time.sleep(0.002)
        step(scheduler)
        inside.clear()

    def between_rounds(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def checked(*given: object) -> object:
            # A round that was begun too early is under way by then.
            time.sleep(0.001)
            if inside.is_set():
                wrong.append(name)
            return original(*given)

        monkeypatch.setattr(owner, name, checked)

    monkeypatch.setattr(Scheduler, "step", slow_step)
    for owner, name in (
        (Scheduler, "submit"),
        (Scheduler, "cancel"),
        (GenerationResponse, "next_events"),
        (GenerationResponse, "body"),
        (Metrics, "emit"),
        (Routes, "_speculation"),
    ):
        between_rounds(owner, name)
    front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.turn()
    assert len(rounds) == 2, "one of the call, and one that it has started"
    front_end.settles = False
    for _ in range(3):
        leaving = front_end.post({**BODY, "max_tokens": 100, "stream": True})
        front_end.post(None, "v1/speculation")
        front_end.turn()
        front_end.turn()
        front_end.leave(leaving)
    front_end.run()
    assert not wrong


def test_a_new_request_does_not_wait_for_a_long_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slice has one round; for the next one the clock stands still, so that only an interrupt ends it."""
    front_end = FrontEnd(time_slice_ms=500)
    begun = threading.Event()
    clock, step = chain([0.0], repeat(1.0)), Scheduler.step

    def announced(scheduler: Scheduler) -> None:
        step(scheduler)
        begun.set()

    monkeypatch.setattr(Scheduler, "step", announced)
    monkeypatch.setattr("specserve.serving.engine_loop.time", SimpleNamespace(monotonic=lambda: next(clock)))
    long = front_end.post({**BODY, "max_tokens": 200, "ignore_eos": True, "speculation": {"mode": "off"}})
    front_end.settles = False
    front_end.turn()
    begun.clear()
    assert begun.wait(10)
    front_end.post(BODY)
    front_end.turn()
    assert long not in front_end.finished
    front_end.run()


def test_the_first_round_of_a_stream_decides_its_status_beside_others(front_end: FrontEnd) -> None:
    front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
    front_end.turn()
    front_end.turn()
    failing = front_end.post({**BODY, "stream": True})
    front_end.turn()
    assert not front_end.chunks[failing], "nothing was tried yet"
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.status[failing] == 500


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
def test_a_client_that_leaves_a_long_whole_response_is_noticed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """After the status deadline empty chunks let TorchServe notice, and it sends the body no longer."""
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    whole = front_end.post({**BODY, "max_tokens": 50, **fields})
    front_end.turn()
    assert front_end.chunks[whole] == [""]
    assert front_end.rows[whole] == {}
    front_end.run()
    assert (front_end.status[whole], front_end.content_type[whole]) == (200, "application/json")
    assert front_end.answer(whole)["usage"]["completion_tokens"] <= 50
    leaving = front_end.post({**BODY, "max_tokens": 200, "ignore_eos": not fields, **fields})
    front_end.turn()
    front_end.leave(leaving)
    assert front_end.sequences() == (0, 0)


def test_torchserve_parses_no_body_in_the_thread_that_answers_streams(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own decoder of requests is asked, which reads the environment at every body."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    decoder = import_module("ts.protocol.otf_message_handler")
    name, kind, body = b"body", b"application/json", json.dumps(BODY).encode()
    frame = b"".join(len(part).to_bytes(4, "big") + part for part in (name, kind, body))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame)
        decoded = decoder._retrieve_input_data(theirs)
    assert bytes(decoded["value"]) == body
    identity = front_end.post(decoded["value"])
    front_end.run()
    assert front_end.status[identity] == 200


def test_a_long_body_is_sent_to_the_handler_once(front_end: FrontEnd) -> None:
    long = front_end.post({**BODY, "max_tokens": 50, "user": "x" * 100_000})
    short = front_end.post({**BODY, "max_tokens": 50, "user": "x" * 1_000})
    front_end.turn()
    assert (front_end.chunks[long], front_end.chunks[short]) == ([""], [])
    assert (front_end.rows[long], len(front_end.rows[short])) == ({}, 1)
    front_end.run()
    assert front_end.answer(long)["usage"]["completion_tokens"] > 0
    refused = front_end.post({**BODY, "prompt": "x" * 100_000})
    front_end.run()
    assert front_end.status[refused] == 400


def test_long_bodies_beyond_a_bound_are_refused_while_others_wait_to_be_parsed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is tokenized until the test lets go; one alone is taken whatever its length, and so are short ones."""
    monkeypatch.setattr(torchserve, "_PARSE_SECONDS", 0.01)
    monkeypatch.setattr(torchserve, "_MAX_WAITING_BYTES", 300_000)
    may = threading.Event()
    encode = FakeVocabulary.encode

    def slow(vocabulary: FakeVocabulary, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        assert may.wait(10)
        return encode(vocabulary, text, special=special, begin=begin)

    monkeypatch.setattr(FakeVocabulary, "encode", slow)
    alone = front_end.post({**BODY, "user": "x" * 400_000})
    front_end.turn()
    refused, short = (front_end.post({**BODY, "user": "x" * length}) for length in (100_000, 50_000))
    front_end.turn()
    front_end.leave(alone)
    taken, beyond, room = (front_end.post({**BODY, "user": "x" * length}) for length in (150_000, 200_000, 100_000))
    front_end.turn()
    refusals = [front_end.status.pop(identity) for identity in (refused, beyond)]
    assert refusals == [503, 503]
    assert "send this one again" in front_end.answer(refused)["error"]["message"]
    assert not front_end.status
    may.set()
    front_end.run()
    assert [front_end.status[identity] for identity in (short, taken, room)] == [200, 200, 200]
    again = front_end.post({**BODY, "user": "x" * 400_000})
    front_end.run()
    assert front_end.status[again] == 200


def test_a_grammar_that_becomes_too_costly_after_the_status_is_an_error_object(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(AlternatingGrammars, "gbnf", lambda _grammars, text: Alternating(200, fails_at=len(text)))
    late = front_end.post({**BODY, "max_tokens": 60, "grammar": "r" * 40, "speculation": {"mode": "off"}})
    front_end.turn()
    assert front_end.chunks[late] == [""]
    front_end.run()
    assert (front_end.status[late], front_end.answer(late)["error"]["code"]) == (200, "grammar_too_costly")


def test_the_status_of_a_short_whole_response_is_sent_at_its_end(front_end: FrontEnd) -> None:
    identity = front_end.post({**BODY, "max_tokens": 50})
    front_end.run()
    assert len(front_end.chunks[identity]) == 1


def test_a_failure_after_the_status_is_an_error_object(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    identity = front_end.post({**BODY, "max_tokens": 50})
    front_end.turn()
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.answer(identity)["error"]["type"] == "server_error"


def test_a_model_failure_is_a_500_or_an_error_event_and_the_next_request_is_served(
    front_end: FrontEnd,
) -> None:
    whole, stream = front_end.post(BODY), front_end.post({**BODY, "stream": True})
    front_end.turn()
    front_end.target.fail_after = 0
    front_end.run()
    assert front_end.status[whole] == 500
    assert front_end.answer(whole)["error"]["type"] == "server_error"
    assert front_end.events(stream)[-1]["error"]["type"] == "server_error"
    after = front_end.post(BODY)
    front_end.run()
    assert front_end.status[after] == 200


@pytest.mark.parametrize("body", [bytearray(b"{"), b"", "text", [1], 5])
def test_a_body_that_is_not_an_object_is_a_400(front_end: FrontEnd, body: object) -> None:
    identity = front_end.post(body)
    front_end.run()
    assert front_end.status[identity] == 400


def test_a_body_of_very_many_lists_is_refused_before_it_is_parsed(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda _body: pytest.fail("it is parsed"))
    identity = front_end.post(json.dumps({"prompt": [[]] * 70_000}).encode())
    front_end.run()
    monkeypatch.undo()
    assert front_end.status[identity] == 400
    assert "opening brackets" in front_end.answer(identity)["error"]["message"]


def test_a_request_without_a_body_is_told_how_to_send_one(front_end: FrontEnd) -> None:
    identity = front_end.post(None)
    front_end.run()
    assert "application/json" in front_end.answer(identity)["error"]["message"]


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


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(front_end: FrontEnd) -> None:
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


def test_a_model_without_a_chat_template_says_so() -> None:
    front_end = FrontEnd(chat_template=None)
    chat = front_end.post(CHAT, "v1/chat/completions")
    front_end.run()
    assert "no chat template" in front_end.answer(chat)["error"]["message"]


def test_the_speedup_is_reset_when_the_draft_model_fails() -> None:
    """Of 150 requests each group has the 30 it needs but for one time in 40,000."""
    front_end = FrontEnd(holdback=0.5)
    for _ in range(150):
        front_end.post({**BODY, "max_tokens": 2})
    front_end.run()
    assert front_end.status_of_speculation()["holdback"]
    front_end.draft.fail_after = 0
    front_end.post({**BODY, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}})
    front_end.run()
    assert front_end.status_of_speculation()["holdback"] is None
