"""Whole responses and events have the fields, and their order, of the models that v1/openapi.json describes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from front_end import FrontEnd
from specserve.api import response_schema as schema
from specserve.api.openapi import openapi

QUESTIONS: dict[str, dict[str, Any]] = {
    "v1/completions": {"prompt": "hello"},
    "v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
OBJECTS: dict[tuple[str, bool], type[schema.ResponseObject]] = {
    ("v1/completions", False): schema.Completion,
    ("v1/completions", True): schema.CompletionChunk,
    ("v1/chat/completions", False): schema.ChatCompletion,
    ("v1/chat/completions", True): schema.ChatCompletionChunk,
}
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "speculation": {"sources": True}},
    {"stop": "e", "prediction": {"type": "content", "content": "hey"}},
    {"logit_bias": {"199": 100}},
]


def check(kind: type[schema.ResponseObject], text: str) -> None:
    """A response follows the document, and is what pydantic writes after reading it, which loses other fields."""
    jsonschema.validate(json.loads(text), {"$ref": f"#/components/schemas/{kind.__name__}", **openapi()})
    assert json.dumps(kind.model_validate_json(text).model_dump(exclude_unset=True)) == text


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("route", "stream"), OBJECTS)
def test_a_response_follows_the_document_and_its_model(
    route: str, fields: dict[str, Any], *, stream: bool, scored: bool
) -> None:
    front_end = FrontEnd()
    scores = {"logprobs": True, "top_logprobs": 2} if "chat" in route else {"logprobs": 2, "echo": True}
    body = {**QUESTIONS[route], **fields, **(scores if scored else {}), "max_tokens": 8, "stream": stream}
    request_id = front_end.post({**body, "stream_options": {"include_usage": True} if stream else None}, route)
    front_end.run()
    text = front_end.text(request_id)
    events = [part.removeprefix("data: ") for part in text.split("\n\n")[:-2]] if stream else [text]
    assert events
    for event in events:
        check(OBJECTS[route, stream], event)


@pytest.mark.parametrize(
    ("route", "status", "kind"),
    [
        ("v1/models", 200, schema.ModelList),
        ("v1/models/qwen", 200, schema.Model),
        ("v1/speculation", 200, schema.SpeculationStatus),
        ("v1/models/none", 404, schema.ErrorResponse),
        ("v1/completions", 400, schema.ErrorResponse),
    ],
)
def test_a_response_without_generations_follows_the_document_and_its_model(
    route: str, status: int, kind: type[schema.ResponseObject]
) -> None:
    front_end = FrontEnd()
    request_id = front_end.post(None, route)
    front_end.run()
    assert front_end.status[request_id] == status
    check(kind, front_end.text(request_id))


def test_the_document_says_which_fields_are_always_written() -> None:
    """`usage` is null in most events of a stream that asks for it; absent fields are never null, so no default is."""
    schemas = openapi()["components"]["schemas"]
    for name, kind in ((kind.__name__, kind) for kind in OBJECTS.values()):
        described = schemas[name]
        assert set(described["required"]) == {key for key, field in kind.model_fields.items() if field.is_required()}
        assert not any("default" in value for value in described["properties"].values())
    chunk = schemas["CompletionChunk"]
    assert {"usage", "speculation"}.isdisjoint(chunk["required"])
    assert {"type": "null"} in chunk["properties"]["usage"]["anyOf"]
    assert "anyOf" not in chunk["properties"]["speculation"]
