"""The OpenAPI document of the routes, generated from the schemas of requests and responses."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

import specserve
from specserve.serving.openai.request_schema import ChatRequest, CompletionRequest
from specserve.serving.openai.response_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorResponse,
    FrontEndError,
    Model,
    ModelList,
    SpeculationStatus,
)

Json = dict[str, Any]

_REQUESTS = (CompletionRequest, ChatRequest)
_RESPONSES = (
    *(Completion, CompletionChunk, ChatCompletion, ChatCompletionChunk),
    *(Model, ModelList, SpeculationStatus, ErrorResponse, FrontEndError),
)


@cache
def openapi() -> Json:
    """The document, OpenAPI 3.1."""
    shapes: list[tuple[str, Literal["validation", "serialization"], TypeAdapter[Any]]] = [
        *((kind.__name__, "validation", TypeAdapter(kind)) for kind in _REQUESTS),
        *((kind.__name__, "serialization", TypeAdapter(kind)) for kind in _RESPONSES),
    ]
    _, schemas = TypeAdapter.json_schemas(shapes, ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specserve",
            "version": specserve.__version__,
            "description": "OpenAI's completions and chat routes over a GGUF model, with speculative decoding.",
        },
        # Relative to this document: the host, model name and version that it was fetched from.
        "servers": [{"url": ".."}],
        "security": [{"key": []}],
        "paths": {
            "/v1/completions": {"post": _generation("Continue texts", "Completion")},
            "/v1/chat/completions": {"post": _generation("Answer a chat", "ChatCompletion")},
            "/v1/models": {"get": _operation("The models of this server", _json("ModelList"))},
            "/v1/models/{id}": {
                "get": {
                    **_operation("One model of this server", _json("Model")),
                    "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/v1/speculation": {
                "get": _operation("Models, kernels, costs and controller of this server", _json("SpeculationStatus"))
            },
            "/v1/openapi.json": {
                "get": _operation("This document", {"application/json": {"schema": {"type": "object"}}}),
            },
        },
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _generation(summary: str, response: str) -> Json:
    answer = _json(response) | {"text/event-stream": {"schema": _event(f"{response}Chunk")}}
    kind = "CompletionRequest" if response == "Completion" else "ChatRequest"
    return {**_operation(summary, answer), "requestBody": {"required": True, "content": _json(kind)}}


def _operation(summary: str, content: Json) -> Json:
    errors = {"anyOf": [_reference("ErrorResponse"), _reference("FrontEndError")]}
    refused = {
        "description": "Refused or failed: by the model's worker, or before it by TorchServe.",
        "content": {"application/json": {"schema": errors}},
    }
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, "default": refused}}


def _event(chunk: str) -> Json:
    """An event of a stream: its data is a chunk as JSON text, or `[DONE]`."""
    written = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(chunk)}
    data = {"anyOf": [{"const": "[DONE]"}, written]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": _reference(schema)}}


def _reference(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}
