"""LiteLLM as a client of chats, responses and messages."""

from typing import Any

import litellm
import pytest
from litellm import completion, responses, stream_chunk_builder

from store import COUNT, MODEL, QUESTION, RULES, count_items
from wire import Wire

FUNCTION: dict[str, Any] = {
    "name": "count_items",
    "description": count_items.__doc__,
    "parameters": {"type": "object", "properties": {"item": {"enum": ["pears", "plums"]}}, "required": ["item"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
MESSAGES: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}]


def options(wire: Wire, protocol: str) -> dict[str, Any]:
    if protocol == "messages":
        # Its key goes into a header that TorchServe does not read.
        headers = {"Authorization": f"Bearer {wire.key}"}
        return {"model": f"anthropic/{MODEL}", "api_base": wire.url, "api_key": wire.key, "extra_headers": headers}
    return {"model": f"openai/{MODEL}", "api_base": f"{wire.url}/v1", "api_key": wire.key}


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_used(wire: Wire, protocol: str, stream: bool) -> None:
    settings = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "stream": stream, **options(wire, protocol)}

    def answer(messages: list[Any], **changes: Any) -> Any:
        said = completion(messages=messages, **settings, **changes)
        return (stream_chunk_builder(list(said), messages=messages) if stream else said).choices[0].message

    first = answer(MESSAGES, tool_choice="required")
    [call] = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": count_items("pears")}
    assert COUNT in answer([*MESSAGES, first, result]).content


def test_a_response_calls_a_tool(wire: Wire) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    answer: Any = responses(input=QUESTION, tools=tools, tool_choice="required", **options(wire, "responses"))
    assert [item.name for item in answer.output if item.type == "function_call"] == ["count_items"]


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_errors_have_litellms_own_classes(wire: Wire, protocol: str) -> None:
    with pytest.raises(litellm.BadRequestError):
        completion(messages=MESSAGES, temperature=-1, **options(wire, protocol))
    with pytest.raises(litellm.ContextWindowExceededError):
        completion(messages=[{"role": "user", "content": "word " * 40_000}], **options(wire, protocol))
    wire.exchanges.clear()
