"""Fuzzing of a running server: every body is served or refused as documented, and no worker is restarted."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from bodies import anything, chats, completions
from server import PATIENCE_SECONDS, Server, registered
from specserve.api.openapi import openapi
from streams import greedy_text

pytestmark = pytest.mark.server


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))


COMPLETIONS, CHATS, COUNT_TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/messages/count_tokens"
KINDS = ["application/json", "text/plain", "application/octet-stream"]
ANYTHING = st.tuples(st.just(COMPLETIONS), completions | anything) | st.tuples(st.just(CHATS), chats | anything)


@pytest.fixture(scope="module")
def fuzzed(server: Server, archive: Callable[..., Path]) -> Iterator[Server]:
    """A model with a short context, so that no answer is long; its worker must not be restarted."""
    archive("fuzzed", handler={"context_length": 64})
    with registered(server, "fuzzed") as fuzzed:
        yield fuzzed
        fuzzed.assert_undisturbed()


@pytest.fixture(scope="module")
def expected(fuzzed: Server) -> str:
    return greedy_text(fuzzed)


def check(answer: requests.Response) -> None:
    """Accept an error in OpenAI's format, a whole response, or a stream that ends with [DONE]."""
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"], answer.text
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]


@examples(150)
@given(route_and_body=ANYTHING)
def test_a_body_is_served_or_refused_and_others_are_answered_as_ever(
    fuzzed: Server, expected: str, route_and_body: tuple[str, object]
) -> None:
    route, body = route_and_body
    check(fuzzed.post(data=json.dumps(body), headers={"Content-Type": "application/json"}, route=route))
    assert greedy_text(fuzzed) == expected


@examples(40)
@given(body=st.binary(max_size=300), kind=st.sampled_from(KINDS))
def test_random_bytes_are_refused(fuzzed: Server, body: bytes, kind: str) -> None:
    answer = fuzzed.post(data=body, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text
    check(answer)


CHECKS: Any = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
CHECKS += [checks.response_schema_conformance, checks.negative_data_rejection]
# Authorization is TorchServe's: requests without a key are not tested here.
DOCUMENT = schemathesis.openapi.from_dict({**openapi(), "security": []})
POSTED = [DOCUMENT[path]["POST"] for path in (COMPLETIONS, CHATS, "/v1/responses", "/v1/messages", COUNT_TOKENS)]
# Requests that the document allows or, in negative mode, forbids.
CASES: Any = st.one_of([route.as_strategy(generation_mode=mode) for route in POSTED for mode in GenerationMode])


def test_the_openapi_document_is_served_and_valid(fuzzed: Server) -> None:
    assert fuzzed.get("/v1/openapi.json").json() == openapi()
    DOCUMENT.validate()


@examples(200)
@given(case=CASES)
def test_requests_and_responses_conform_to_the_openapi_document(fuzzed: Server, case: Any) -> None:
    headers = fuzzed.authorization()
    case.call_and_validate(base_url=fuzzed.url, headers=headers, checks=CHECKS, timeout=PATIENCE_SECONDS)
