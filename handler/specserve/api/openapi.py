"""The OpenAPI document of the routes: the bodies of requests, from the models that validate them."""

from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

import specserve
from specserve.api.anthropic import CountRequest, MessagesRequest
from specserve.api.body import Body
from specserve.api.infill import InfillRequest
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.responses import ResponsesRequest

# By path: a summary, and the model of the body that is posted.
_ROUTES: dict[str, tuple[str, type[Body] | None]] = {
    "/v1/completions": ("Continue texts", CompletionRequest),
    "/v1/chat/completions": ("Answer a chat", ChatRequest),
    "/v1/responses": ("Answer a chat, in OpenAI's later form", ResponsesRequest),
    "/v1/messages": ("Answer a chat, in Anthropic's form", MessagesRequest),
    "/v1/messages/count_tokens": ("Count the tokens of such a chat", CountRequest),
    "/infill": ("Fill the gap between two texts, in llama.cpp's form", InfillRequest),
    "/v1/models": ("The models of this server", None),
    "/v1/models/{id}": ("One model of this server", None),
    "/v1/speculation": ("Models, kernels, costs and controller of this server", None),
    "/v1/openapi.json": ("This document", None),
}
_REFERENCE = "#/components/schemas/{model}"
_OBJECT = {"schema": {"type": "object"}}
_JSON = {"application/json": _OBJECT}
_REFUSED = {"description": "Refused", "content": _JSON}


class _Nullable(GenerateJsonSchema):
    """Says that null is the same as leaving a field out."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        known = super().default_schema(schema)
        return known if schema.get("default") is None else {"anyOf": [known, {"type": "null"}]}


@cache
def openapi() -> dict[str, Any]:
    """Make the document, OpenAPI 3.1; the references of each protocol describe its responses."""
    shapes: list[Any] = [(kind, "validation") for _, kind in _ROUTES.values() if kind]
    _, schemas = models_json_schema(shapes, ref_template=_REFERENCE, schema_generator=_Nullable)
    paths: dict[str, Any] = {}
    for path, (summary, kind) in _ROUTES.items():
        content = _JSON | ({"text/event-stream": _OBJECT} if kind else {})
        responses = {"200": {"description": "OK", "content": content}, "default": _REFUSED}
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if kind:
            schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post" if kind else "get": operation}
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
