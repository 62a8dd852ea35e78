"""The OpenAPI document of the routes: the bodies of requests, from the models that validate them."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

import specserve
from specserve.api.anthropic import CountRequest, MessagesRequest
from specserve.api.infill import InfillRequest
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.responses import ResponsesRequest

_POST = {
    "/v1/completions": ("Continue texts", CompletionRequest),
    "/v1/chat/completions": ("Answer a chat", ChatRequest),
    "/v1/responses": ("Answer a chat, in OpenAI's later form", ResponsesRequest),
    "/v1/messages": ("Answer a chat, in Anthropic's form", MessagesRequest),
    "/v1/messages/count_tokens": ("Count the tokens of such a chat", CountRequest),
    "/infill": ("Fill the gap between two texts, in llama.cpp's form", InfillRequest),
}
_GET = {
    "/v1/models": "The models of this server",
    "/v1/models/{id}": "One model of this server",
    "/v1/speculation": "Models, kernels, costs and controller of this server",
    "/v1/openapi.json": "This document",
}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}


@cache
def openapi() -> dict[str, Any]:
    """Make the document, OpenAPI 3.1; the references of each protocol describe its responses."""
    shapes: list[Any] = [(kind, "validation") for _, kind in _POST.values()]
    _, schemas = models_json_schema(shapes, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in _GET.items()}
    for path, (summary, kind) in _POST.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        operation = _operation(summary) | {"requestBody": {"required": True, "content": content}}
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "object"}}
        paths[path] = {"post": operation}
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{id}"]["parameters"] = [model_id]
    return {
        "openapi": "3.1.0",
        "info": {"title": "specserve", "version": specserve.__version__},
        # Relative to this document: the host, model name and version that it was fetched from.
        "servers": [{"url": ".."}],
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(summary: str) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": {**_OBJECT}}}
    return {"summary": summary, "responses": responses | {"default": {"description": "Refused", "content": _OBJECT}}}
