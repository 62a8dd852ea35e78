"""Any body is served or refused with OpenAI's error object, and does not affect a concurrent valid request."""

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import test_requests
from bodies import anything, chats, completions, infills, messages, responses
from front_end import ROUTES, FrontEnd, says
from specserve.api import dialects
from specserve.api.anthropic import CountRequest, MessagesRequest
from specserve.api.call_formats import FORMATS
from specserve.api.infill import InfillRequest, infill_prompt
from specserve.api.parse import parse_body
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.resolve import resolve
from specserve.api.response import Response
from specserve.api.responses import ResponsesRequest
from specserve.core.text_sequence import TextSequence
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ConstraintError, RequestError
from specserve.grammar.compiler import GrammarCompiler
from tiny_models import write_tiny

CONFIG = test_requests.CONFIG.model_copy(update={"context_length": 256})
pytestmark = pytest.mark.slow


def chat_of(request: Any) -> Any:
    """The chat that a request of any protocol becomes."""
    if isinstance(request, ResponsesRequest):
        return request.chat(request.messages())
    return request.chat() if isinstance(request, CountRequest) else request


@pytest.fixture(scope="module")
def sequences_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, object], list[TextSequence]]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, "qwen2", "target")
    vocabulary = LlamaModel(path)
    grammars, tokenizer = GrammarCompiler(vocabulary), Tokenizer(vocabulary, CONFIG)

    def sequences(kind: Any, body: object) -> list[TextSequence]:
        request = parse_body(body, kind)
        prompts = [Prompt([1, 2], "")]
        if kind is InfillRequest:
            prompts = [infill_prompt(request, tokenizer, vocabulary)]
            request = request.completion()
        elif kind is CompletionRequest:
            prompts = tokenizer.completion(request)
        else:
            request = chat_of(request)
        return resolve(request, prompts, vocabulary, grammars, CONFIG, calls=FORMATS["any"][1])[1]

    return sequences


def check_refusal(error: RequestError) -> None:
    """The error is a 4xx, and its object is valid JSON."""
    assert 400 <= error.status < 500
    body = json.loads(Response(Response.error_body(error)).text())
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith((".", "!", "?"))
    assert len(body["error"]["message"]) < 2000


in_bytes = st.binary(max_size=200) | st.text(max_size=200) | anything.map(lambda value: json.dumps(value).encode())
KINDS: dict[Any, st.SearchStrategy[Any]] = {CompletionRequest: completions | in_bytes, ChatRequest: chats}
KINDS |= {ResponsesRequest: responses, MessagesRequest: messages, InfillRequest: infills}


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind_and_body=st.one_of(*(st.tuples(st.just(kind), bodies | anything) for kind, bodies in KINDS.items())))
def test_a_body_is_served_or_refused(kind_and_body: tuple[type[Any], object], sequences_of: Any) -> None:
    try:
        sequences = sequences_of(*kind_and_body)
    except RequestError as error:
        check_refusal(error)
        return
    for sequence in sequences:
        assert sequence.prompt_length + sequence.max_tokens <= CONFIG.context_length
    if (constraint := sequences[0].constraint) is not None:
        written: list[int] = []
        with suppress(ConstraintError):
            while len(written) < 6 and (mask := constraint.allowed(written)) is not None and mask.any():
                written.append(int(mask.argmax()))


VALID = {"prompt": "hello", "max_tokens": 30, "temperature": 0}


@pytest.fixture(scope="module")
def expected() -> str:
    return str(FrontEnd().ask(VALID)["choices"][0]["text"])


BY_ROUTE = dict(zip(ROUTES, (completions, chats, responses, messages), strict=True))
BY_ROUTE |= {"v1/messages/count_tokens": messages, "infill": infills}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(others=st.lists(st.one_of(*(st.tuples(bodies, st.just(route)) for route, bodies in BY_ROUTE.items()))))
def test_a_valid_request_is_not_affected_by_others(others: list[tuple[dict[str, Any], str]], expected: str) -> None:
    front_end = FrontEnd()
    valid = front_end.begin(VALID)
    posted = [front_end.post(body, route) for body, route in others]
    front_end.run()
    assert front_end.answer(valid)["choices"][0]["text"] == expected
    for request_id in posted:
        assert front_end.status[request_id] in {200, 400, 404}
        if front_end.status[request_id] != 200:
            assert front_end.answer(request_id)["error"]["message"]


BODIES: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: says("a"),
    ResponsesRequest: {"input": "a"},
    CountRequest: says("a"),
    MessagesRequest: {**says("a"), "max_tokens": 1},
    InfillRequest: {"input_prefix": "a", "input_suffix": "b"},
}
ODD: list[Any] = [{}, [], [[]], "", -1, 1e400, True, {"": ""}]
ODD += [{"type": {}}, {"type": []}, {"type": "a"}, [{"type": {}}]]


def test_no_value_of_a_known_field_makes_parsing_fail() -> None:
    """Unhashable values where names are looked up, for example; random bodies meet few of them."""
    for kind, body in BODIES.items():
        names = {field.alias or name for name, field in kind.model_fields.items()} | dialects.KNOWN
        for name, value in product(sorted(names), ODD):
            with suppress(RequestError):
                chat_of(parse_body({**body, name: value}, kind))
