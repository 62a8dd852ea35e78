"""Every body that the OpenAPI document allows or forbids is served or refused, and no worker is restarted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from front_end import FrontEnd
from server import PATIENCE_SECONDS, Server, registered

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def fuzzed(server: Server, archive: Callable[..., Path]) -> Iterator[Server]:
    """A model with a short context, so that no answer is long; its worker must not be restarted."""
    archive("fuzzed", handler={"context_length": 64})
    with registered(server, "fuzzed") as fuzzed:
        yield fuzzed
        fuzzed.assert_undisturbed()


CHECKS: Any = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
CHECKS += [checks.response_schema_conformance, checks.negative_data_rejection]
# Authorization is TorchServe's: requests without a key are not tested here.
SERVED = FrontEnd().ask(None, "v1/openapi.json")
DOCUMENT = schemathesis.openapi.from_dict({**SERVED, "security": []})
ROUTES = ("completions", "chat/completions", "responses", "messages", "messages/count_tokens")
POSTED = [DOCUMENT[f"/v1/{route}"]["POST"] for route in ROUTES]
# Requests that the document allows or, in negative mode, forbids.
CASES: Any = st.one_of([route.as_strategy(generation_mode=mode) for route in POSTED for mode in GenerationMode])


def test_the_openapi_document_is_served_and_valid(fuzzed: Server) -> None:
    assert fuzzed.get("/v1/openapi.json").json() == SERVED
    DOCUMENT.validate()


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_requests_and_responses_conform_to_the_openapi_document(fuzzed: Server, case: Any) -> None:
    headers = fuzzed.authorization()
    case.call_and_validate(base_url=fuzzed.url, headers=headers, checks=CHECKS, timeout=PATIENCE_SECONDS)
