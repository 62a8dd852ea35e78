"""The handler with continuous batching, called by a fake of TorchServe's front end that enforces the protocol."""

import gc
import json
import re
import socket
import sys
import threading
import time
import weakref
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from constraints import Alternating, AlternatingGrammars
from fake_engine import FakeVocabulary
from front_end import CHATS, MESSAGES, ROUTES, SLOTS, FakeContext, FrontEnd, body_of
from specserve.api import parser_threads, routes
from specserve.api.choices import ChoicesResponse
from specserve.api.response import GenerationResponse
from specserve.api.routes import Routes
from specserve.core.scheduler import Scheduler
from specserve.core.text_sequence import TextSequence
from specserve.engine.kernels import Left
from specserve.observability.metrics import DRAFT_MODEL, Metric, Metrics
from specserve.torchserve import handler as torchserve


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
USAGE = {"include_usage": True}


def test_streams_continue_while_a_request_is_parsed(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt blocks the tokenizer until the test sets an event; a second request waits."""
    monkeypatch.setattr(parser_threads, "_PARSE_SECONDS", 0.01)
    stream = front_end.begin({**BODY, "stream": True, "max_tokens": 40})
    assert '"text": "' in front_end.chunks[stream][0], "the first chunk has text"
    release, tokenized, encode = threading.Event(), [], FakeVocabulary(200).encode

    def slow(text: str, **options: bool) -> list[int]:
        tokenized.append(text)
        assert text != "slow" or release.wait(10)
        return encode(text, **options)

    monkeypatch.setattr(FakeVocabulary, "encode", staticmethod(slow))
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


def test_of_a_finished_sequence_only_tokens_are_kept(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, submitted = Scheduler.submit, weakref.WeakSet[TextSequence]()

    def remembered(scheduler: Scheduler, sequence: TextSequence, waited: float) -> None:
        submitted.add(sequence)
        submit(scheduler, sequence, waited)

    monkeypatch.setattr(Scheduler, "submit", remembered)
    body: dict[str, Any] = {**BODY, "prompt": "the prompt of this test", "grammar": "root", "logprobs": 5}
    front_end.post({**body, "prediction": {"type": "content", "content": "what may be"}, "echo": True})
    cancelled = front_end.begin({**body, "stream": True, "max_tokens": 100})
    assert len(submitted) == 2
    front_end.disconnect(cancelled)
    front_end.run()
    front_end.handle_once()
    gc.collect()
    assert not submitted
    assert front_end.ask(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == len(body["prompt"]) - 1


def test_usage_comes_at_the_end_of_a_stream_or_in_each_chunk_if_asked_for(front_end: FrontEnd) -> None:
    """As in vLLM the latter needs the former."""
    options = ({**USAGE}, {**USAGE, "continuous_usage_stats": True}, {"continuous_usage_stats": True})
    streams = [front_end.post({**BODY, "stream": True, "stream_options": option}) for option in options]
    front_end.run()
    (*before, at_end), continuous, none = map(front_end.events, streams)
    assert all(chunk["usage"] is None for chunk in before)
    assert at_end["choices"] == []
    assert at_end["speculation"]["rounds"] > 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in continuous]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert continuous[-1]["usage"] == continuous[-2]["usage"]
    assert at_end["usage"]["completion_tokens"] == counts[-1]
    assert not any("usage" in chunk for chunk in none)


def test_a_model_that_is_not_exact_is_listed_so() -> None:
    for left in (Left(formats=("IQ4_XS",)), Left(("attention",))):
        front_end = FrontEnd(left=left)
        assert front_end.ask(None, "v1/models/qwen")["exact"] == (not left.parts)
        found = front_end.speculation_status()
        assert found["left_to_llama_cpp"] == {"parts": list(left.parts), "formats": list(left.formats)}
        assert found["batch_invariance"] == {"exact": not left.parts, "sentence": left.sentence}
        assert f"exact: {json.dumps(not left.parts)}" in left.sentence


def test_models_are_listed_and_retrieved_and_an_unknown_model_or_route_is_a_404(front_end: FrontEnd) -> None:
    for bare in ("", None, "/v1/completions/"):
        assert front_end.ask(BODY, bare)["object"] == "text_completion"
    assert [model["id"] for model in front_end.ask(None, "v1/models")["data"]] == ["tiny", "qwen"]
    one = front_end.ask(None, "v1/models/qwen")
    assert (one["id"], one["max_model_len"]) == ("qwen", 256)
    for body, route, code, words in (
        (None, "v1/models/gpt-4", "model_not_found", "this server has tiny, qwen."),
        ({**BODY, "model": "gpt-4"}, "v1/completions", "model_not_found", "'gpt-4'"),
        (BODY, "v1/embeddings", "unknown_url", "this server generates text only"),
    ):
        status, error = front_end.refusal(body, route)
        assert (status, error["code"]) == (404, code)
        assert words in error["message"]


def test_a_prompt_that_is_too_long_is_refused_in_openais_words(front_end: FrontEnd) -> None:
    """Agents shorten the conversation when they read them, and send it again otherwise."""
    # LiteLLM looks for the first words, opencode for the number too, Cline for two of them, Continue for the last ones.
    begin = r"This model's maximum context length is 256 tokens\. However, your (\w+) resulted in (at least )?\d+ "
    for text, route in product(("x" * 400, "x" * 1_000_000), ROUTES[:3]):
        status, error = front_end.refusal(body_of(route, text), route)
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
        assert re.fullmatch(begin + r"tokens\. Please reduce the length of the \1\.", error["message"])


def test_rounds_run_between_calls_never_beside_work(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
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
    work = {Scheduler: ["submit", "cancel"], ChoicesResponse: ["next_events", "text"]}
    for owner, names in {**work, Metrics: ["emit"], Routes: ["_speculation"]}.items():
        for name in names:
            between_rounds(owner, name)
    front_end.begin({**BODY, "max_tokens": 100, "ignore_eos": True})
    assert len(rounds) == 2, "one in the call, and one that it has started"
    front_end.waits_for_slice = False
    for _ in range(3):
        cancelled = front_end.post({**BODY, "max_tokens": 100, "stream": True})
        front_end.begin(None, "v1/speculation")
        front_end.handle_once()
        front_end.disconnect(cancelled)
    front_end.run()
    assert not overlapping


def test_a_new_or_gone_request_interrupts_the_slice(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, interrupts = Mock(), []
    monkeypatch.setattr(front_end.handler._loop, "interrupt", interrupt)
    for call in range(9):
        if call in {0, 3}:
            stream = front_end.post({**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True})
        if call == 6:
            front_end.disconnect(stream)
        front_end.handle_once()
        interrupts.append(interrupt.call_count)
    # The disconnect is noticed when a chunk has been sent, so the call after that lacks the request.
    assert interrupts == [1, 1, 1, 2, 2, 2, 2, 3, 3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for `time` in torchserve/handler.py."""
    clock = Mock(**{"monotonic.return_value": 0.0})
    monkeypatch.setattr(torchserve, "time", clock)
    return clock


def test_a_request_that_waits_hears_something_every_ten_seconds(front_end: FrontEnd, clock: Mock) -> None:
    others = [(MESSAGES, True, 'event: ping\ndata: {"type": "ping"}\n\n'), (CHATS, False, " "), (MESSAGES, False, " ")]
    signs = [*((route, True, ": \n\n") for route in ROUTES[:3]), *others]
    for _ in range(SLOTS):
        front_end.post({**BODY, "max_tokens": 240, "ignore_eos": True, "speculation": {"mode": "off"}})
    front_end.handle_once()
    waiting = [front_end.post(body_of(route, max_tokens=4, stream=stream), route) for route, stream, _ in signs]
    for _ in range(19):
        front_end.handle_once()
        clock.monotonic.return_value += 2.5
    for request_id, (_, _, sign) in zip(waiting, signs, strict=True):
        # After 2.5, 12.5, 22.5, 32.5 and 42.5 seconds; empty chunks between them.
        assert front_end.chunks[request_id] == ([sign, "", "", ""] * 5)[:18]
    front_end.run()
    assert {front_end.status[request_id] for request_id in waiting} == {200}
    assert all(front_end.answer(request_id)["usage"] for request_id in waiting[-2:])


def test_a_stream_whose_text_comes_in_time_has_no_signs_of_life(front_end: FrontEnd, clock: Mock) -> None:
    """Two calls in ten seconds; calls without text are those that bring the beginning of a character."""
    body = {**BODY, "max_tokens": 200, "temperature": 1, "ignore_eos": True, "speculation": {"mode": "off"}}
    stream = front_end.post({**body, "seed": 1, "stream": True})
    while stream in front_end.rows:
        front_end.handle_once()
        clock.monotonic.return_value += 4.5
    assert "" in front_end.chunks[stream][1:]
    assert ": \n\n" not in front_end.text(stream)


def test_a_disconnect_from_a_whole_response_is_noticed(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the status deadline empty chunks let TorchServe notice it, and it stops sending the request body."""
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    whole = front_end.begin({**BODY, "max_tokens": 50})
    assert front_end.chunks[whole] == [" "]
    assert front_end.rows[whole] == {}
    front_end.run()
    assert (front_end.status[whole], front_end.content_type[whole]) == (200, "application/json")
    assert front_end.answer(whole)["usage"]["completion_tokens"] <= 50
    cancelled = front_end.begin({**BODY, "n": 12, "max_tokens": 200, "ignore_eos": True})
    front_end.disconnect(cancelled)
    # It is noticed with the next chunk.
    front_end.handle_once()
    assert front_end.sequences() == (0, 0)


def test_torchserve_passes_json_bodies_on_unparsed(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert front_end.ask(decoded["value"])["choices"]


def test_a_long_body_is_sent_to_the_handler_once(front_end: FrontEnd) -> None:
    long = front_end.post({**BODY, "max_tokens": 50, "user": "x" * 100_000})
    short = front_end.begin({**BODY, "max_tokens": 50, "user": "x" * 1_000})
    assert (front_end.chunks[long], front_end.chunks[short]) == ([" "], [])
    assert (front_end.rows[long], len(front_end.rows[short])) == ({}, 1)
    front_end.run()
    assert front_end.answer(long)["usage"]["completion_tokens"] > 0
    assert front_end.refusal({**BODY, "prompt": "x" * 100_000})[0] == 400


def test_streams_wait_once_for_a_long_parse(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    front_end.begin({**BODY, "stream": True, "max_tokens": 40})
    release, wait, encode = threading.Event(), Mock(), FakeVocabulary.encode
    monkeypatch.setattr(FakeVocabulary, "encode", lambda *a, **options: release.wait(10) and encode(*a, **options))
    monkeypatch.setattr(parser_threads, "wait", wait)
    for _ in range(3):
        front_end.begin(BODY)
    assert [call.args[1] for call in wait.mock_calls] == [parser_threads._PARSE_SECONDS, 0.0, 0.0]
    release.set()
    monkeypatch.undo()
    front_end.run()


def test_a_request_that_forbids_every_token_is_told_so_and_no_other_suffers(front_end: FrontEnd) -> None:
    nothing = {"grammar": "r" * 9, "allowed_token_ids": [*range(0, 200, 2)]}
    refused = [front_end.post({**BODY, **nothing, "speculation": {"mode": mode}}) for mode in ("off", "auto")]
    other = front_end.answered(BODY)
    for request_id in refused:
        error = front_end.answer(request_id)["error"]
        assert (front_end.status[request_id], error["code"]) == (400, "invalid_value")
        assert error["message"] == "The request allows no token that could follow."
    assert front_end.status[other] == 200


def test_a_failure_after_the_status_is_an_error_object(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(AlternatingGrammars, "gbnf", lambda _grammars, text: Alternating(200, fails_at=len(text)))
    costly = front_end.begin({**BODY, "max_tokens": 60, "grammar": "r" * 40, "speculation": {"mode": "off"}})
    assert front_end.chunks[costly] == [" "]
    front_end.run()
    assert (front_end.status[costly], front_end.answer(costly)["error"]["code"]) == (200, "grammar_too_costly")
    failed = front_end.begin({**BODY, "max_tokens": 50})
    front_end.target.fail_after = 0
    front_end.run()
    assert (front_end.status[failed], front_end.answer(failed)["error"]["type"]) == (200, "server_error")


class Panic(BaseException):
    """As the panics of llguidance, which is written in Rust."""


FAILURES: dict[Any, list[str]] = {routes: ["parse_body"], Scheduler: ["submit", "cancel"], ChoicesResponse: ["_news"]}
FAILURES |= {GenerationResponse: ["_totals"], FakeContext: ["get_all_request_header", "set_response_content_type"]}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in FAILURES.items() for name in names])
def test_what_a_request_raises_fails_it_alone(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)
    body = {**BODY, "max_tokens": 20}
    streamed = {**body, "stream": True, "stream_options": USAGE}
    bodies: dict[BaseException, Any] = {KeyError("gone"): (body, streamed), Panic("out of bounds"): (streamed, body)}
    for error, sent in bodies.items():
        front_end, errors = FrontEnd(), [error]

        def failing(*arguments: Any, errors: list[BaseException] = errors, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)
        requests = [*map(front_end.post, sent)]
        front_end.run()
        requests.append(front_end.answered(body))
        [failed] = [request_id for request_id in requests if '"server_error"' in front_end.text(request_id)]
        if front_end.status[failed] == 200:
            assert front_end.events(failed)[-1]["error"]["message"].endswith("its log says why.")
        else:
            assert front_end.status[failed] == 500
        assert len({front_end.output(request_id) for request_id in requests if request_id != failed}) == 1


def test_a_failure_to_tell_a_failure_ends_a_stream(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [front_end.post({**BODY, "stream": True, "max_tokens": 40}) for _ in range(2)]
    front_end.handle_once()
    monkeypatch.setattr(front_end.handler._responses[streams[0]], "next_events", lambda: pytest.fail("as always"))
    front_end.run()
    assert "[DONE]" not in front_end.text(streams[0])
    assert front_end.events(streams[1])[-1]["choices"][0]["finish_reason"]


def test_what_a_round_raises_fails_its_sequences(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """`truncate` is called before a sequence's first round, `forward` in every round. The next request is served."""
    for owner, name, calls_before, error in (
        (front_end.target, "truncate", 0, KeyError("gone")),
        (front_end.target, "forward", 1, KeyError("gone")),
        (Scheduler, "run_round", 1, Panic("index out of bounds")),
    ):
        failed = front_end.post({**BODY, "max_tokens": 100, "ignore_eos": True})
        for _ in range(calls_before):
            front_end.handle_once()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error))
            front_end.run()
        assert (front_end.status[failed], front_end.answer(failed)["error"]["type"]) == (500, "server_error"), name
        assert front_end.ask(BODY)["choices"]


def test_a_draft_model_that_fails_is_reported_and_changes_no_answer(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gauges: list[dict[Metric, float]] = []
    monkeypatch.setattr(Metrics, "emit", lambda _metrics, found: gauges.append(found))
    body = {**BODY, "max_tokens": 60, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}}
    expected = front_end.output(front_end.answered(body))
    stream = front_end.begin({**body, "stream": True})
    assert (front_end.speculation_status()["draft_model_up"], gauges[-1][DRAFT_MODEL]) == (True, True)
    front_end.draft.fail_after = 0
    front_end.run()
    assert front_end.output(stream) == expected
    assert (front_end.speculation_status()["draft_model_up"], gauges[-1][DRAFT_MODEL]) == (False, False)
    [logged] = [record for record in caplog.records if "Decoding goes on without it" in record.message]
    assert logged.levelname == "ERROR"


def test_metrics_that_cannot_be_sent_are_logged_once_and_fail_nobody(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Metrics, "emit", lambda _metrics: None)  # a TypeError
    assert front_end.ask({**BODY, "max_tokens": 60})["choices"]
    [logged] = [record.message for record in caplog.records if record.exc_info]
    assert logged == "specserve: metrics cannot be sent; this is not logged again"


def test_parts_of_a_form_are_no_headers(front_end: FrontEnd) -> None:
    names = ("authorization", "Authorization", "x-api-key", "url_path", "explain", "host", "")
    for name, paths in product(names, ({}, {"url_path": CHATS, "explain": "False"})):
        form = front_end.send({name: b"x"}, {"Host": "127.0.0.1"} | paths)
        front_end.run()
        assert front_end.status[form] == 400
        assert "application/json" in front_end.answer(form)["error"]["message"]


def test_a_body_that_is_not_an_object_is_refused(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is missing, with a sentence that says how to send it."""
    numbers = b'{"prompt": ' + b"1" * 10_000 + b"}", b'{"prompt": "a", "max_tokens": 1e999}'
    for body in (bytearray(b"{"), b"[1, 2", b"\xff", b"", "text", [1], 5, *numbers, b"[" * 60_000, None):
        status, error = front_end.refusal(body)
        assert (status, error["type"]) == (400, "invalid_request_error")
    assert "application/json" in error["message"]
    brackets = front_end.post(json.dumps({"prompt": [[]] * 70_000}).encode())
    monkeypatch.setattr(json, "loads", lambda _body: pytest.fail("it is parsed"))
    front_end.run()
    monkeypatch.undo()
    assert front_end.status[brackets] == 400
    assert "opening brackets" in front_end.answer(brackets)["error"]["message"]


def test_a_chat_is_the_completion_of_its_rendered_messages(front_end: FrontEnd) -> None:
    chat = body_of(CHATS, max_tokens=12, temperature=0)
    [choice] = front_end.ask(chat, CHATS)["choices"]
    [same] = front_end.ask({**BODY, "prompt": "user: hello\nassistant: "})["choices"]
    assert choice["message"]["content"] == same["text"]
    _, error = FrontEnd(chat_template=None).refusal(chat, CHATS)
    assert "no chat template" in error["message"]


KEY = {"Authorization": "Bearer a"}
OTHER = {"Authorization": "Bearer b"}


def test_lookups_find_what_answers_to_the_same_key_and_pool_wrote() -> None:
    """Two different keys in one request are a key of their own, so nobody becomes another by a second header."""
    for first, pool, second, other_pool, finds in (
        (KEY, {}, KEY, {}, True),
        (KEY, {}, OTHER, {}, False),
        ({}, {}, {}, {}, True),
        ({}, {}, KEY, {}, False),
        (KEY, {}, {}, {}, False),
        (KEY, {"pool": "a"}, KEY, {"pool": "a"}, True),
        (KEY, {"pool": "a"}, KEY, {"pool": "b"}, False),
        (KEY, {"pool": "a"}, OTHER, {"pool": "a"}, False),
        (KEY, {"pool": ""}, KEY, {"pool": ""}, False),
        (KEY, {}, {"authorization": "Bearer a"}, {}, True),
        (KEY, {}, {"AUTHORIZATION": "Bearer a"}, {}, True),
        (KEY, {}, {"x-api-key": "Bearer a"}, {}, True),
        (KEY, {}, {"X-API-Key": "b"}, {}, False),
        (KEY, {}, {**KEY, "X-Api-Key": "b"}, {}, True),
        (KEY, {}, {**KEY, "authorization": "Bearer b"}, {}, False),
        (KEY, {}, {**OTHER, "authorization": "Bearer a"}, {}, False),
    ):
        front_end, accepted = FrontEnd(), list[int]()
        for headers, options in ((first, pool), (second, other_pool)):
            speculation = {"mode": "fixed", "gamma": 8, "drafter": "lookup", **options}
            body = {**BODY, "prompt": "abcd", "max_tokens": 60, "ignore_eos": True, "speculation": speculation}
            accepted.append(front_end.ask(body, **headers)["speculation"]["accepted_tokens"])
        assert (accepted[1] > accepted[0]) == finds, (first, pool, second, other_pool)


def test_a_cache_salt_separates_prefixes_on_every_route(front_end: FrontEnd) -> None:
    for number, route in enumerate(ROUTES):
        text = f"prompt {number} that is long enough to be found again " * 2
        cached = []
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {}):
            usage = front_end.ask(body_of(route, text, max_tokens=2, **salt), route)["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            cached.append(details["cached_tokens"] if details else usage["cache_read_input_tokens"])
        assert [tokens > 50 for tokens in cached] == [False, False, True, True]
