"""The OpenAPI document of the routes: the bodies of requests, from the models that validate them."""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

import specserve
from specserve.api.body import Body

_REFERENCE = "#/components/schemas/{model}"
_OBJECT = {"schema": {"type": "object"}}
_JSON = {"application/json": _OBJECT}
_REFUSED = {"description": "Refused", "content": _JSON}


class _Nullable(GenerateJsonSchema):
    """Says that null is the same as leaving a field out."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        known = super().default_schema(schema)
        return known if schema.get("default") is None else {"anyOf": [known, {"type": "null"}]}


def openapi(routes: Mapping[str, type[Body] | None]) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1, of routes with the bodies that are posted to them, None where they are read.

    The references of each protocol describe its responses.
    """
    shapes: list[Any] = [(kind, "validation") for kind in routes.values() if kind]
    _, schemas = models_json_schema(shapes, ref_template=_REFERENCE, schema_generator=_Nullable)
    paths: dict[str, Any] = {}
    for route, kind in routes.items():
        content = _JSON | ({"text/event-stream": _OBJECT} if kind else {})
        responses = {"200": {"description": "OK", "content": content}, "default": _REFUSED}
        operation: dict[str, Any] = {"responses": responses}
        if kind:
            schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[f"/{route}"] = {"post" if kind else "get": operation}
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
