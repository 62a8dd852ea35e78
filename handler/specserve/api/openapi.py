"""The OpenAPI document of the routes, generated from the schemas of requests and responses."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

import specserve
from specserve.api import anthropic, infill, request_schema, response_schema, responses

Json = dict[str, Any]

_REQUESTS = (
    *(request_schema.CompletionRequest, request_schema.ChatRequest, responses.ResponsesRequest),
    *(anthropic.MessagesRequest, anthropic.CountRequest, infill.InfillRequest),
)
_RESPONSES = (
    *("Completion", "CompletionChunk", "ChatCompletion", "ChatCompletionChunk"),
    *("Model", "ModelList", "SpeculationStatus", "ErrorResponse", "FrontEndError"),
)


@cache
def openapi() -> Json:
    """Make the document, OpenAPI 3.1."""
    shapes: list[tuple[str, Literal["validation", "serialization"], TypeAdapter[Any]]] = [
        *((request.__name__, "validation", TypeAdapter(request)) for request in _REQUESTS),
        *((name, "serialization", TypeAdapter(getattr(response_schema, name))) for name in _RESPONSES),
    ]
    _, schemas = TypeAdapter.json_schemas(shapes, ref_template="#/components/schemas/{model}")
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    about_server = "Models, kernels, costs and controller of this server"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specserve",
            "version": specserve.__version__,
            "description": "OpenAI's and Anthropic's routes over a GGUF model, with speculative decoding.",
        },
        # Relative to this document: the host, model name and version that it was fetched from.
        "servers": [{"url": ".."}],
        "security": [{"key": []}],
        "paths": {
            "/v1/completions": {"post": _generation("Continue texts", "CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _generation("Answer a chat", "ChatRequest", "ChatCompletion")},
            "/v1/responses": {"post": _translation("Answer a chat, in OpenAI's later form", "ResponsesRequest")},
            "/v1/messages": {"post": _translation("Answer a chat, in Anthropic's form", "MessagesRequest")},
            "/v1/messages/count_tokens": {"post": _translation("Count the tokens of such a chat", "CountRequest")},
            "/infill": {"post": _translation("Fill the gap between two texts, in llama.cpp's form", "InfillRequest")},
            "/v1/models": {"get": _operation("The models of this server", _json("ModelList"))},
            "/v1/models/{id}": {
                "get": {**_operation("One model of this server", _json("Model")), "parameters": [model_id]}
            },
            "/v1/speculation": {"get": _operation(about_server, _json("SpeculationStatus"))},
            "/v1/openapi.json": {
                "get": _operation("This document", {"application/json": {"schema": {"type": "object"}}}),
            },
        },
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _generation(summary: str, request: str, response: str) -> Json:
    """Describe a route that generates; an event of its stream has a chunk as JSON text, or `[DONE]`."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(f"{response}Chunk")}
    data = {"anyOf": [{"const": "[DONE]"}, chunk]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    answer = _json(response) | {"text/event-stream": {"schema": event}}
    return {**_operation(summary, answer), "requestBody": {"required": True, "content": _json(request)}}


def _translation(summary: str, request: str) -> Json:
    """Describe a route of another form, whose own references have its responses, events and errors."""
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "object"}}}
    described = _operation(summary, answer)
    described["responses"]["default"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    return {**described, "requestBody": {"required": True, "content": _json(request)}}


def _operation(summary: str, content: Json) -> Json:
    """Describe a route: its answer, and the errors that all routes have."""
    errors = {"anyOf": [_reference("ErrorResponse"), _reference("FrontEndError")]}
    refused = {
        "description": "Refused or failed: by the model's worker, or before it by TorchServe.",
        "content": {"application/json": {"schema": errors}},
    }
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, "default": refused}}


def _json(schema: str) -> Json:
    """Describe JSON content that follows one of the schemas."""
    return {"application/json": {"schema": _reference(schema)}}


def _reference(schema: str) -> Json:
    """Refer to one of the schemas."""
    return {"$ref": f"#/components/schemas/{schema}"}
