"""OpenAI's own client: tools in chats and in responses, its helpers that parse, and its readers of streams."""

from __future__ import annotations

from typing import Any, Literal

import openai
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


def test_a_chat_calls_a_tool_and_uses_its_result(wire: Wire) -> None:
    chat = client(wire).chat.completions
    first = chat.create(messages=MESSAGES, tools=CHAT_TOOLS, tool_choice="required", **SETTINGS).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls
    counted = count_items(CountItems.model_validate_json(call.function.arguments).item)
    result = {"role": "tool", "tool_call_id": call.id, "content": counted}
    last = chat.create(messages=[*MESSAGES, first.message, result], tools=CHAT_TOOLS, **SETTINGS).choices[0]
    assert last.finish_reason == "stop"
    assert COUNT in last.message.content


def test_a_streamed_chat_calls_a_tool_and_uses_its_result(wire: Wire) -> None:
    chat = client(wire).chat.completions
    options: Any = {"tools": CHAT_TOOLS, "stream_options": {"include_usage": True}, **SETTINGS}
    with chat.stream(messages=MESSAGES, tool_choice="required", **options) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [call] = first.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, CountItems)
    assert first.usage.completion_tokens > 0
    result = {"role": "tool", "tool_call_id": call.id, "content": count_items("pears")}
    with chat.stream(messages=[*MESSAGES, first.choices[0].message, result], **options) as stream:
        text = stream.get_final_completion().choices[0].message.content
    assert COUNT in text


def test_a_chat_with_a_choice_of_none_calls_nothing(wire: Wire) -> None:
    answer = client(wire).chat.completions.create(
        messages=MESSAGES, tools=CHAT_TOOLS, tool_choice="none", max_tokens=40, **SETTINGS
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_the_helpers_of_chats_parse_calls_and_answers(wire: Wire) -> None:
    chat = client(wire).chat.completions
    named: Any = {"type": "function", "function": {"name": "count_items"}}
    called = chat.parse(messages=MESSAGES, tools=CHAT_TOOLS, tool_choice=named, **SETTINGS)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, CountItems)
    answered = chat.parse(messages=MESSAGES, response_format=Stock, **SETTINGS)
    assert isinstance(answered.choices[0].message.parsed, Stock)


def test_a_response_calls_a_tool_and_uses_its_result(wire: Wire) -> None:
    responses = client(wire).responses
    options: Any = {"instructions": RULES, "tools": RESPONSES_TOOLS, "store": False, **SETTINGS}
    first = responses.create(input=QUESTION, tool_choice="required", **options)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert CountItems.model_validate_json(call.arguments)
    turns = [{"role": "user", "content": QUESTION}, *first.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": count_items("pears")})
    last = responses.create(input=turns, **options)
    assert last.status == "completed"
    assert COUNT in last.output_text


def test_a_streamed_response_calls_a_tool_and_uses_its_result(wire: Wire) -> None:
    responses = client(wire).responses
    options: Any = {"instructions": RULES, "tools": RESPONSES_TOOLS, **SETTINGS}
    with responses.stream(input=QUESTION, tool_choice="required", **options) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.function_call_arguments.done" in kinds
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": count_items("pears")}
    with responses.stream(input=[{"role": "user", "content": QUESTION}, *first.output, result], **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        last = stream.get_final_response()
    assert text == last.output_text
    assert COUNT in text
    assert last.usage.output_tokens > 0


def test_the_helper_of_responses_parses_an_answer(wire: Wire) -> None:
    answer = client(wire).responses.parse(input=QUESTION, text_format=Stock, **SETTINGS)
    assert isinstance(answer.output_parsed, Stock)


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
