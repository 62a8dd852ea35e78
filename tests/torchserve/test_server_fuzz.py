"""Fuzzing of a running server: every body is served or refused as documented, and no worker is restarted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from bodies import anything, chats, completions
from server import PATIENCE_SECONDS, Server, running, worker
from specserve.api.openapi import openapi
from tiny_config import tiny_config

pytestmark = pytest.mark.server

hundreds = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
dozens = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ANYTHING = st.tuples(st.just(COMPLETIONS), completions | anything) | st.tuples(st.just(CHATS), chats | anything)
VALID = {"prompt": "The quick brown fox", "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a short context, so that no answer is long; its worker must not be restarted."""
    with running(config=tiny_config(tmp_path_factory.mktemp("config"), handler={"context_length": 64})) as server:
        before = worker(server.state).pid
        yield server
        assert worker(server.state).pid == before, "the worker was restarted"


@pytest.fixture(scope="module")
def expected(fuzzed: Server) -> str:
    """The text of the valid request before all others."""
    return valid_text(fuzzed)


def valid_text(server: Server) -> str:
    """The text of the valid request."""
    answer = server.post(VALID)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def check(answer: requests.Response) -> None:
    """Accept an error in OpenAI's format, a whole response, or a stream that ends with [DONE]."""
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"], answer.text
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]


@hundreds
@given(body=completions | anything)
def test_a_completions_body_is_served_or_refused(fuzzed: Server, expected: str, body: object) -> None:
    check(fuzzed.post(data=json.dumps(body), headers={"Content-Type": "application/json"}))
    assert valid_text(fuzzed) == expected


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(route_and_body=ANYTHING)
def test_twenty_thousand_bodies_are_served_or_refused_by_one_worker(
    fuzzed: Server, route_and_body: tuple[str, object]
) -> None:
    route, body = route_and_body
    check(fuzzed.post(data=json.dumps(body), headers={"Content-Type": "application/json"}, route=route))


@hundreds
@given(body=chats | anything)
def test_a_chat_body_is_served_or_refused(fuzzed: Server, body: object) -> None:
    check(fuzzed.post(data=json.dumps(body), headers={"Content-Type": "application/json"}, route=CHATS))


@dozens
@given(
    body=st.binary(max_size=300), kind=st.sampled_from(["application/json", "text/plain", "application/octet-stream"])
)
def test_random_bytes_are_refused(fuzzed: Server, body: bytes, kind: str) -> None:
    answer = fuzzed.post(data=body, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text
    check(answer)


CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Authorization is TorchServe's: requests without a key are not tested here.
DOCUMENT = schemathesis.openapi.from_dict({**openapi(), "security": []})


def cases(path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Requests that the document allows or, in negative mode, forbids."""
    return DOCUMENT[path]["POST"].as_strategy(generation_mode=mode)


def test_the_openapi_document_is_served_and_valid(fuzzed: Server) -> None:
    answer = fuzzed.get("/v1/openapi.json")
    assert answer.json() == openapi()
    DOCUMENT.validate()


@dozens
@given(data=st.data())
def test_requests_and_responses_conform_to_the_openapi_document(fuzzed: Server, data: st.DataObject) -> None:
    headers = {"Authorization": f"Bearer {fuzzed.key}"}
    for path in (COMPLETIONS, CHATS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        for mode in GenerationMode:
            case = data.draw(cases(path, mode))
            case.call_and_validate(base_url=fuzzed.url, headers=headers, checks=CHECKS, timeout=PATIENCE_SECONDS)


def test_a_stream_conforms_to_the_openapi_document(fuzzed: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    case = DOCUMENT["/v1/chat/completions"]["POST"].Case(body=body, media_type="application/json")
    headers = {"Authorization": f"Bearer {fuzzed.key}"}
    answer = case.call_and_validate(base_url=fuzzed.url, headers=headers, checks=CHECKS, timeout=PATIENCE_SECONDS)
    assert answer.headers["content-type"] == ["text/event-stream"]
