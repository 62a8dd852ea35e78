"""A fake of TorchServe's front end that enforces the protocol of continuous batching."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from constraints import AlternatingGrammars
from costs import flat
from fake_engine import FakeEngine, FakeVocabulary
from fake_placement import FakeMachine, placement_on
from specserve.api.answer import AnswerReader, Call, Part
from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig
from specserve.core.engine_loop import engine_thread
from specserve.core.loading import Models
from specserve.engine.kernels import Kernels, Left
from specserve.engine.kv_cache import KVCache
from specserve.observability.metrics import Served
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.ngram import LookupProposer, Pools, PredictionProposer
from specserve.speculation.policy import Controller
from specserve.speculation.proposers import GrammarProposer
from specserve.torchserve import handler as torchserve
from specserve.torchserve.handler import Handler

SLOTS = 4
# Tokens are bytes, and these are not ASCII; token 199 is the end token.
ASCII_ONLY = {str(token): -100 for token in range(128, 199)}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


ROUTES = ["v1/completions", "v1/chat/completions", "v1/responses", "v1/messages"]
COMPLETIONS, CHATS, RESPONSES, MESSAGES = ROUTES


def says(content: Any, role: str = "user") -> dict[str, Any]:
    """The field of a chat of one message."""
    return {"messages": [{"role": role, "content": content}]}


def body_of(route: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A request with this text to a route."""
    return {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}.get(route, says(text)) | fields


class FrontEnd:
    """TorchServe's live requests: each has a row, which contains its body until the first reply."""

    def __init__(
        self, *, chat_template: str | None = TEMPLATE, grammars: Any = None, left: Left | None = None, **options: Any
    ) -> None:
        self.target = FakeEngine(vocabulary=200, n_slots=SLOTS)
        self.draft = FakeEngine(vocabulary=200, n_slots=SLOTS, blend=0.3)
        self.handler = Handler()
        vocabulary: Any = FakeVocabulary(200)
        vocabulary.template, vocabulary.weights = chat_template, (1000, 4000)
        vocabulary.description = mock.Mock(return_value="a fake model")
        grammars = grammars or AlternatingGrammars(200)
        config = HandlerConfig(
            model_id="tiny",
            target=ModelConfig(path=Path("t")),
            draft=ModelConfig(path=Path("d")),
            sequences=SLOTS,
            **{"context_length": 256, "speculation": SpeculationConfig(holdback=0), **options},
        )
        sizes = {"window": 64, "max_rows": 32, "vocabulary": 200, "context_length": 4096}
        model = DraftModel(KVCache(self.draft), flat(0.001), **sizes)
        end_tokens = vocabulary.end_tokens()
        proposers = PredictionProposer(), LookupProposer(Pools(1000)), GrammarProposer()
        controller = Controller(flat(0.01), flat(0.001))
        drafters = Drafters(controller, *proposers, model=model, end_tokens=end_tokens)
        placement, kernels = placement_on(FakeMachine()), Kernels(None, (), "a fake engine computes")
        parts = vocabulary, grammars, KVCache(self.target), drafters, placement, kernels
        models = Models(*parts, config, left or Left())
        self._engine_thread = engine_thread()
        with mock.patch.object(torchserve, "engine_thread", return_value=self._engine_thread):
            self.handler.start(config, lambda _config: models, Served("qwen", "1.0"))
        self.handler._loop.slice_seconds = 0
        self.rows: dict[str, dict[str, Any]] = {}
        self.request_headers: dict[str, dict[str, str]] = {}
        self.chunks: dict[str, list[str]] = {}
        self.status: dict[str, int] = {}
        self.content_type: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.finished: set[str] = set()
        self._left: set[str] = set()
        self.waits_for_slice = True  # whether `handle_once` waits for the end of the time slice that it has started
        self._count = 0

    def post(self, body: object, route: str | None = "v1/completions", **headers: str) -> str:
        """Send a request, its body as JSON unless it is bytes; returns its id."""
        sent = body if isinstance(body, bytes | bytearray) else json.dumps(body).encode()
        # Without a version in the URL there is no `url_path`.
        paths = {} if route is None else {"url_path": route, "explain": "False"}
        return self.send({"body": bytes(sent)} if body is not None else {}, {"Host": "127.0.0.1"} | headers | paths)

    def send(self, parts: dict[str, bytes], headers: dict[str, str]) -> str:
        """Send a request with these parts, such as the fields of a form, and exactly these headers; returns its id."""
        self._count += 1
        request_id = f"r{self._count}"
        self.rows[request_id] = parts
        self.request_headers[request_id] = headers
        self.chunks[request_id] = []
        return request_id

    def begin(self, body: object, route: str | None = "v1/completions") -> str:
        """Send a request and call handle() once; returns its id."""
        request_id = self.post(body, route)
        self.handle_once()
        return request_id

    def disconnect(self, request_id: str) -> None:
        """Close the client's connection, which TorchServe notices when it has sent a chunk."""
        self._left.add(request_id)

    def handle_once(self) -> None:
        """Call handle() once, and process its replies as the front end does."""
        context = FakeContext(self)
        answers = self.handler.handle(list(self.rows.values()), context)
        assert len(answers) == len(self.rows)
        for index, request_id in context.request_ids.items():
            more = context.stopping_criteria[index](answers[index])
            if more is None:
                assert not self.chunks[request_id], "a whole response after chunks"
                self.finished.add(request_id)
            elif more:
                assert self.chunks[request_id], "the first chunk is the last one: the client would hang"
                self.finished.add(request_id)
            # In front of the handler's own guard TorchServe encodes what it returns; what fails there ends the worker.
            answers[index].encode()
            self.chunks[request_id].append(answers[index])
            self.status.setdefault(request_id, context.status.get(index, 200))
            assert self.status[request_id] < 400 or more is None, "an error status on a chunk loses its body"
            self.content_type.setdefault(request_id, context.types.get(index, ""))
            self.headers.setdefault(request_id, context.headers.get(index, {}))
            self.rows[request_id] = {}
            if request_id in self._left:
                self.finished.add(request_id)
        for request_id in self.finished & self.rows.keys():
            del self.rows[request_id]
        if self.waits_for_slice:
            self._engine_thread.submit(lambda: None).result()

    def run(self) -> None:
        """Call handle() until no request is live."""
        for _ in range(1000):
            if not self.rows:
                return
            self.handle_once()
        raise AssertionError(f"Unanswered: {list(self.rows)}")

    def answered(self, body: object, route: str | None = "v1/completions", **headers: str) -> str:
        """Send a request; returns its id once all requests are answered."""
        request_id = self.post(body, route, **headers)
        self.run()
        return request_id

    def ask(self, body: object, route: str | None = "v1/completions", **headers: str) -> Any:
        return self.answer(self.answered(body, route, **headers))

    def refusal(self, body: object, route: str | None = "v1/completions") -> tuple[int, Any]:
        request_id = self.answered(body, route)
        return self.status[request_id], self.answer(request_id)["error"]

    def failed_stream(self, body: dict[str, Any], route: str) -> str:
        """The stream that answers a request, whose model fails after the first text."""
        stream = self.post({**body, "stream": True, "ignore_eos": True, "max_tokens": 100}, route)
        while not any(self.chunks[stream]):
            self.handle_once()
        self.target.fail_after = 0
        self.run()
        return self.text(stream)

    def speculation_status(self) -> Any:
        return self.answer(self.begin(None, "v1/speculation"))

    def sequences(self) -> tuple[int, int]:
        counts = self.speculation_status()["sequences"]
        return counts["live"], counts["waiting"]

    def text(self, request_id: str) -> str:
        """The response body that the client has received."""
        return "".join(self.chunks[request_id])

    def answer(self, request_id: str) -> Any:
        return json.loads(self.text(request_id))

    def events(self, request_id: str) -> list[Any]:
        """The events of a stream of choices."""
        return events_of(self.text(request_id))

    def output(self, request_id: str) -> str:
        """The text of the choices of a completion or chat, whole or streamed."""
        whole = self.content_type[request_id] == "application/json"
        events = [self.answer(request_id)] if whole else self.events(request_id)
        return "".join(text_of(choice) for event in events for choice in event["choices"])


def events_of(text: str) -> list[Any]:
    """A stream's events without the final [DONE], which is checked, and without comments."""
    lines = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1] if not event.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(choice: Any) -> str:
    """The text of a choice, whole or a chunk of it, on either route."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content", ""))


# What responses have beside the fields of OpenAI's; the last as other servers name it.
OURS = {"speculation", "sources", "reasoning_content"}


def check(kind: type[BaseModel], decoded: Any) -> None:
    """A response or event is one of OpenAI's by the models of its own client, which lets other fields pass."""
    found = kind.model_validate_json(json.dumps(decoded))
    unknown = [found]
    while unknown:
        inner = unknown.pop()
        assert {*(inner.model_extra or ())} <= OURS
        for _, value in inner:
            unknown += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, BaseModel)]


def named_events(text: str) -> list[Any]:
    """The events of a stream whose events have names, which their types repeat."""
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


class ScriptedReader:
    """Reads a fixed answer, one part with each text and the rest at the end, whatever the text is."""

    def __init__(self, parts: Sequence[Part], *, cut: bool = False) -> None:
        self._parts = parts
        # Whether the answer ends within a call.
        self._cut = cut
        self._read: dict[AnswerReader, int] = {}

    def read(self, reader: AnswerReader, _text: str, *, done: bool) -> list[Part]:
        """Stand in for AnswerReader.read."""
        begin = self._read.get(reader, 0)
        end = len(self._parts) if done else begin + 1
        self._read[reader] = end
        reader.calls = sum(isinstance(part, Call) for part in self._parts[:end])
        return [*self._parts[begin:end]]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have it read all answers."""
        monkeypatch.setattr(AnswerReader, "read", lambda reader, text, *, done: self.read(reader, text, done=done))
        monkeypatch.setattr(AnswerReader, "is_within_call", self._cut)


class FakeContext:
    def __init__(self, front_end: FrontEnd) -> None:
        self.model_name = "qwen"
        self.manifest: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}
        self.metrics: Any = None
        self.request_ids = dict(enumerate(front_end.rows))
        self.stopping_criteria: list[Callable[[object], bool | None]] = []
        self.status: dict[int, int] = {}
        self.types: dict[int, str] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self._front_end = front_end

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Names as the client has spelt them, and the parts of its body among them."""
        request_id = self.request_ids[idx]
        parts = {part: {"content-type": ""} for part in self._front_end.rows[request_id]}
        return parts | self._front_end.request_headers[request_id]

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        assert phrase.isascii()
        self.status[idx] = code

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.types[idx] = value

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        # What TorchServe cannot write as a header ends its thread, and with it the worker.
        assert f"{key}{value}".isascii()
        assert f"{key}{value}".isprintable()
        self.headers.setdefault(idx, {})[key] = value
