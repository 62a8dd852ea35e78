"""Parses the bodies of requests: validates them, and explains in one sentence what is wrong with one."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from specserve.api.body import Body
from specserve.api.dialects import translated
from specserve.api.request_schema import MAX_CHOICES, MAX_STOPS
from specserve.errors import RequestError

# Opening brackets in a body, strings included. Python builds lists and objects one by one, while no other thread runs:
# 260,000 take 0.1 s.
_MAX_BRACKETS = 65_536

# What is right, by the field's name or by pydantic's type of error.
_EXPECTED = {
    "prompt": f"must be a string of valid Unicode, a list of token ids, or a list of up to {MAX_CHOICES} of either",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings, none of them over 1000 characters",
    "messages": "must be a list of {role, content}, role being system, developer, user, assistant or tool",
    "content": "must be a string of valid Unicode, or a list of parts of type 'text'",
    "logit_bias": "must map token ids, such as '42', to biases from -100 to 100",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
# Fields whose inner fields are named.
_NESTED = {
    *("speculation", "stream_options", "messages", "response_format", "structured_outputs", "prediction", "tools"),
    *("input_extra", "input", "text", "reasoning", "system"),
}

AnyRequest = TypeVar("AnyRequest", bound=Body)


def parse_body(body: object, kind: type[AnyRequest]) -> AnyRequest:
    """Validate a request's body: bytes as TorchServe hands them over, or a decoded JSON value.

    Raises:
        RequestError: 400; `param` names the field that is wrong.
    """
    if isinstance(body, bytes | bytearray):
        if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
            raise RequestError(f"The request's body has more than {_MAX_BRACKETS} opening brackets.")
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The request's body must be a JSON object; send it with content-type application/json.")
    body, names_sent = translated(body, kind.model_fields)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)).renamed(names_sent) from error


def _explain(errors: list[Any]) -> RequestError:
    # A union has one error a member; the member that fits best fails deepest.
    same_field = (found for found in errors if found["loc"][:1] == errors[0]["loc"][:1])
    error = max(same_field, key=lambda found: len(found["loc"]))
    if not error["loc"]:
        return RequestError("The name of a field is not valid Unicode.", code="invalid_value")
    # pydantic adds the types it tried, such as "list[TextPart]".
    field, *inside = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    inside = inside if field in _NESTED else []
    param = field + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
    if error["type"] == "missing":
        return RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
    if error["type"] == "none_required":
        return RequestError(f"'{param}' is not supported by this server.", param=param, code="unsupported_value")
    message = error["msg"][0].lower() + error["msg"][1:]
    expected = _EXPECTED.get(str([field, *inside][-1]), _EXPECTED.get(error["type"], message))
    return RequestError(f"Invalid value for '{param}': {expected}.", param=param, code="invalid_value")
