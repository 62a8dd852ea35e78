"""The handler under TorchServe's continuous batching, with a stand-in for its front end that enforces the contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.config import HandlerConfig, ModelConfig
from specserve.engine.fake import FakeEngine, FakeVocabulary
from specserve.serving.chat import ChatTemplate
from specserve.serving.loading import Models
from specserve.serving.torchserve import Handler
from specserve.speculation.drafters import ModelDrafter

SLOTS = 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class FrontEnd:
    """TorchServe's side: rows of live requests, bodies shown once, and every rule of its protocol checked."""

    def __init__(self) -> None:
        self.target = FakeEngine(vocabulary=200, n_slots=SLOTS)
        draft = FakeEngine(vocabulary=200, n_slots=SLOTS, blend=0.3)
        self.handler = Handler()
        vocabulary: Any = FakeVocabulary(200)
        config = HandlerConfig(
            model_id="tiny",
            target=ModelConfig(path=Path("t")),
            draft=ModelConfig(path=Path("d")),
            sequences=SLOTS,
            context_length=256,
            time_slice_ms=0,
        )
        models = Models(
            vocabulary,
            self.target,
            ModelDrafter(draft, max_rows=32, vocabulary=200, context_length=4096),
            plain_step_seconds=0.01,
        )
        models = replace(models, chat_template=ChatTemplate(TEMPLATE, bos="", eos=""))
        self.handler.start(config, models, "qwen")
        self.rows: dict[str, dict[str, Any]] = {}
        self.routes: dict[str, str | None] = {}
        self.chunks: dict[str, list[str]] = {}
        self.status: dict[str, int] = {}
        self.content_type: dict[str, str] = {}
        self.finished: set[str] = set()
        self._count = 0

    def post(self, body: object, route: str | None = "v1/completions") -> str:
        """A new request; its id."""
        self._count += 1
        identity = f"r{self._count}"
        self.rows[identity] = {"body": body} if body is not None else {}
        self.routes[identity] = route
        self.chunks[identity] = []
        return identity

    def leave(self, identity: str) -> None:
        """The client closes its connection."""
        del self.rows[identity]

    def turn(self) -> None:
        """One call of handle() and what the front end makes of its answer."""
        order = list(self.rows)
        context = FakeContext(self, order)
        data = list(self.rows.values())
        answers = self.handler.handle(data, context)
        assert len(answers) == len(data)
        for index, identity in context.request_ids.items():
            more = context.stopping_criteria[index](answers[index])
            if more is None:
                assert not self.chunks[identity], "a whole answer after chunks"
                self.finished.add(identity)
            elif more:
                assert self.chunks[identity], "the first chunk is the last one: the client would hang"
                self.finished.add(identity)
            self.chunks[identity].append(answers[index])
            self.status.setdefault(identity, context.status.get(index, 200))
            assert self.status[identity] < 400 or more is None, "an error status on a chunk loses its body"
            self.content_type.setdefault(identity, context.types.get(index, ""))
            self.rows[identity] = {}
        for identity in self.finished & self.rows.keys():
            del self.rows[identity]

    def run(self) -> None:
        """Turns until no request is left."""
        for _ in range(1000):
            if not self.rows:
                return
            self.turn()
        raise AssertionError(f"Unanswered: {list(self.rows)}")

    def text(self, identity: str) -> str:
        """All that a client received."""
        return "".join(self.chunks[identity])

    def answer(self, identity: str) -> Any:
        """A whole answer's JSON."""
        return json.loads(self.text(identity))

    def events(self, identity: str) -> list[Any]:
        """A stream's events, the closing one checked and left out."""
        lines = [line.removeprefix("data: ") for line in self.text(identity).split("\n\n")[:-1]]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class FakeContext:
    """What TorchServe hands to handle()."""

    def __init__(self, front_end: FrontEnd, order: list[str]) -> None:
        self.model_name = "qwen"
        self.model_yaml_config: dict[str, Any] = {}
        self.request_ids = dict(enumerate(order))
        self.stopping_criteria: list[Callable[[object], bool | None]] = []
        self.status: dict[int, int] = {}
        self.types: dict[int, str] = {}
        self._routes = [front_end.routes[identity] for identity in order]

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self._routes[idx] if key == "url_path" else None

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        assert phrase
        self.status[idx] = code

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.types[idx] = value


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


def test_a_completion_is_openais_object_with_usage_and_the_account(front_end: FrontEnd) -> None:
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


def test_a_stream_says_the_same_text_in_chunks(front_end: FrontEnd) -> None:
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


def test_include_usage_adds_null_to_every_chunk_and_one_chunk_with_the_totals(front_end: FrontEnd) -> None:
    stream = front_end.post({**BODY, "stream": True, "stream_options": {"include_usage": True}})
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


def test_a_client_that_leaves_frees_its_slot(front_end: FrontEnd) -> None:
    leaving = [front_end.post({**BODY, "max_tokens": 200, "stream": True, "seed": i}) for i in range(SLOTS)]
    front_end.turn()
    front_end.turn()
    for identity in leaving:
        front_end.leave(identity)
    after = front_end.post(BODY)
    front_end.turn()
    assert front_end.handler._scheduler.live <= 1
    front_end.run()
    assert front_end.status[after] == 200


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
def test_a_body_that_is_no_object_is_a_400(front_end: FrontEnd, body: object) -> None:
    identity = front_end.post(body)
    front_end.run()
    assert front_end.status[identity] == 400


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


def test_a_model_without_a_chat_template_says_so(front_end: FrontEnd) -> None:
    front_end.handler._models = replace(front_end.handler._models, chat_template=None)
    chat = front_end.post(CHAT, "v1/chat/completions")
    front_end.run()
    assert "no chat template" in front_end.answer(chat)["error"]["message"]
