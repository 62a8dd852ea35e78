"""Bodies become requests, or errors in OpenAI's words that name the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from specserve.errors import RequestError
from specserve.serving.requests import DISAGREEMENT, MAX_CHOICES, MAX_STOPS, UNKNOWN_FIELD, GenerationRequest

_NOT_SERVED = frozenset({"tools", "tool_choice", "functions", "function_call", "modalities", "audio"})
_EXPECTED = {
    "prompt": f"must be a string of valid Unicode, a list of token ids, or a list of up to {MAX_CHOICES} of either",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings, none of them empty or over 1000 characters",
    "messages": "must be a list of {role, content}, role being system, developer, user or assistant and content text",
}

# Lists and objects, as their brackets count, those in texts included. Python makes them one by one and lets no other
# thread run meanwhile: 260,000 of them take 0.1 s. A prompt of as many characters fills most contexts.
_MAX_BRACKETS = 65_536

AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse_body(body: object, kind: type[AnyRequest]) -> AnyRequest:
    """Validate what TorchServe made of a request's body: a mapping, or bytes where that was not JSON.

    Raises:
        RequestError: 400; `param` names the field that is wrong.
    """
    if isinstance(body, bytes | bytearray | str):
        text = body if isinstance(body, str) else bytes(body).decode("latin-1")
        if text.count("[") + text.count("{") > _MAX_BRACKETS:
            raise RequestError(f"The request's body has more than {_MAX_BRACKETS} opening brackets.")
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The request's body must be a JSON object; send it with content-type application/json.")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from error


def _explain(error: Any) -> RequestError:
    """OpenAI's error for pydantic's: one sentence that names the field."""
    if error["type"] == DISAGREEMENT:
        param, sentence = error["ctx"]["param"], error["ctx"]["sentence"]
        return RequestError(f"Invalid request: {sentence}.", param=param, code="invalid_value")
    # pydantic names the kinds it tried as well, as in "list[TextPart]".
    place = [str(part) for part in error["loc"] if str(part).isidentifier() or isinstance(part, int)]
    field, *inside = [*place, error["ctx"]["field"]] if error["type"] == UNKNOWN_FIELD else place
    if field == "response_format":
        inside = inside[1:]  # pydantic names the form before its field
    nested = ("speculation", "stream_options", "messages", "response_format", "prediction")
    param = ".".join([field, *inside[:2]]) if field in nested else field
    if error["type"] == UNKNOWN_FIELD:
        return RequestError(f"Unknown field: '{param}'.", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
    if field in _NOT_SERVED:
        return RequestError(f"'{param}' is not supported by this server.", param=param, code="unsupported_value")
    expected = _EXPECTED.get(field)
    if expected is None:
        message = str(error["msg"])
        expected = message[0].lower() + message[1:]
    return RequestError(f"Invalid value for '{param}': {expected}.", param=param, code="invalid_value")
