"""OpenAI's own client: tools in chats and in responses, its helpers that parse, and its readers of streams."""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from store import COUNT, MODEL, QUESTION, RULES, Stock, count_items, slow_question
from wire import Wire


class CountItems(BaseModel):
    """Count the items of a kind in the store."""

    item: Literal["pears", "plums"]


CHAT_TOOLS: Any = [openai.pydantic_function_tool(CountItems, name="count_items")]
RESPONSES_TOOLS: Any = [{"type": "function", **CHAT_TOOLS[0]["function"]}]
MESSAGES: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}]
SETTINGS: Any = {"model": MODEL, "temperature": 0}


def client(wire: Wire) -> Any:
    return openai.OpenAI(base_url=f"{wire.url}/v1", api_key=wire.key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_calls_a_tool_and_uses_its_result(wire: Wire, stream: bool) -> None:
    options: Any = {"tools": CHAT_TOOLS, **SETTINGS}
    kinds: list[str] = []

    def choice(messages: list[Any], **changes: Any) -> Any:
        chat = client(wire).chat.completions
        if not stream:
            return chat.create(messages=messages, **options, **changes).choices[0]
        with chat.stream(messages=messages, stream_options={"include_usage": True}, **options, **changes) as events:
            kinds.extend(event.type for event in events)
            answer = events.get_final_completion()
        assert answer.usage.completion_tokens > 0
        return answer.choices[0]

    first = choice(MESSAGES, tool_choice="required")
    assert first.finish_reason == "tool_calls"
    assert ("tool_calls.function.arguments.done" in kinds) == stream
    [call] = first.message.tool_calls
    counted = count_items(CountItems.model_validate_json(call.function.arguments).item)
    last = choice([*MESSAGES, first.message, {"role": "tool", "tool_call_id": call.id, "content": counted}])
    assert last.finish_reason == "stop"
    assert COUNT in last.message.content


def test_the_helpers_of_chats_and_responses_parse_calls_and_answers(wire: Wire) -> None:
    chat = client(wire).chat.completions
    named: Any = {"type": "function", "function": {"name": "count_items"}}
    called = chat.parse(messages=MESSAGES, tools=CHAT_TOOLS, tool_choice=named, **SETTINGS)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, CountItems)
    answered = chat.parse(messages=MESSAGES, response_format=Stock, **SETTINGS)
    assert isinstance(answered.choices[0].message.parsed, Stock)
    response = client(wire).responses.parse(input=QUESTION, text_format=Stock, **SETTINGS)
    assert isinstance(response.output_parsed, Stock)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_calls_a_tool_and_uses_its_result(wire: Wire, stream: bool) -> None:
    options: Any = {"instructions": RULES, "tools": RESPONSES_TOOLS, "store": False, **SETTINGS}
    kinds: list[str] = []

    def respond(turns: list[Any], **changes: Any) -> Any:
        responses = client(wire).responses
        if not stream:
            return responses.create(input=turns, **options, **changes)
        with responses.stream(input=turns, **options, **changes) as events:
            received = list(events)
            answer = events.get_final_response()
        kinds.extend(event.type for event in received)
        text = "".join(event.delta for event in received if event.type == "response.output_text.delta")
        assert text == answer.output_text
        assert answer.usage.output_tokens > 0
        return answer

    question = {"role": "user", "content": QUESTION}
    first = respond([question], tool_choice="required")
    assert ("response.function_call_arguments.done" in kinds) == stream
    [call] = [item for item in first.output if item.type == "function_call"]
    counted = count_items(CountItems.model_validate_json(call.arguments).item)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": counted}
    last = respond([question, *first.output, result])
    assert last.status == "completed"
    assert COUNT in last.output_text


def test_signs_of_life_before_the_first_token_of_a_chat_are_no_text(wire: Wire) -> None:
    chat, question = client(wire).chat.completions, slow_question()
    options: Any = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, **SETTINGS}
    chunks = [chunk for chunk in chat.create(stream=True, **options) if chunk.choices]
    assert wire.exchanges[-1].reply.startswith(b": \n\n")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.create(**options).choices[0].message.content


def test_signs_of_life_before_the_first_token_of_a_response_are_no_text(wire: Wire) -> None:
    responses, question = client(wire).responses, slow_question()
    options: Any = {"input": question, "max_output_tokens": 16, **SETTINGS}
    with responses.stream(**options) as stream:
        text = stream.get_final_response().output_text
    assert b"\n\n: \n\n" in b"\n\n" + wire.exchanges[-1].reply
    assert text == responses.create(**options).output_text
