"""What the proxy of the client tests accepts and rejects, on answers written by hand."""

import json
from typing import Any

import jsonschema
import pytest

from wire import Exchange, Wire

SCHEMA = {"type": "object", "properties": {"item": {"enum": ["pears"]}}, "required": ["item"]}
CHAT = {"tools": [{"type": "function", "function": {"name": "count", "parameters": SCHEMA}}]}
RESPONSES = {"tools": [{"type": "function", "name": "count", "parameters": SCHEMA}, {"type": "web_search"}]}
MESSAGES = {"tools": [{"name": "count", "input_schema": SCHEMA}]}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]


def stream(*events: Any) -> bytes:
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events).encode()


def delta(**call: Any) -> Any:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": call}]}}]}


def called(route: str, body: Any, arguments: str) -> list[Exchange]:
    """A call, whole and streamed, in the protocol of a route."""
    if route == "/v1/chat/completions":
        function = {"name": "count", "arguments": arguments}
        whole: Any = {"choices": [{"index": 0, "message": {"tool_calls": [{"function": function}]}}]}
        events: list[Any] = [delta(name="count", arguments=""), delta(arguments=arguments[:4])]
        events += [delta(arguments=arguments[4:]), "[DONE]"]
    elif route == "/v1/responses":
        whole = {"output": [{"type": "function_call", "call_id": "1", "name": "count", "arguments": arguments}]}
        events = [{"type": "response.created", "response": {}}, {"type": "response.completed", "response": whole}]
    else:
        block = {"type": "tool_use", "name": "count"}
        whole = {"content": [{**block, "input": json.loads(arguments)}]}
        pieces = [{"type": "input_json_delta", "partial_json": text} for text in (arguments[:4], arguments[4:])]
        events = [{"type": "content_block_start", "index": 0, "content_block": {**block, "input": {}}}]
        events += [{"type": "content_block_delta", "index": 0, "delta": piece} for piece in pieces]
        events += [{"type": "message_stop"}]
    return [
        Exchange("POST", route, body, 200, json.dumps(whole).encode(), is_whole=True),
        Exchange("POST", route, {**body, "stream": True}, 200, stream(*events), is_whole=True),
    ]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_calls_are_read_whole_and_streamed_and_what_is_wrong_is_rejected(route: str, body: Any) -> None:
    wire = Wire("", "", "", called(route, body, '{"item": "pears"}'))
    wire.check()
    assert wire.called == ["count", "count"]
    for exchange in called(route, body, '{"item": "coal"}'):
        with pytest.raises(jsonschema.ValidationError):
            Wire("", "", "", [exchange]).check()
    [_, exchange] = called(route, body, '{"item": "pears"}')
    exchange.reply = exchange.reply[: exchange.reply.rindex(b"data:")]
    with pytest.raises(AssertionError):
        Wire("", "", "", [exchange]).check()
    with pytest.raises(AssertionError):
        Wire("", "", "", [Exchange("POST", route, body, 400, b"{}", is_whole=True)]).check()
