"""Anthropic's own client: tools in messages, streams, its runner of tools, counted tokens, and answers with a form."""

from typing import Any

import anthropic
import pytest

from store import COUNT, MODEL, QUESTION, RULES, Stock, count_items, slow_question
from wire import Wire

ITEM: Any = {"item": {"enum": ["pears", "plums"]}}
SCHEMA: Any = {"type": "object", "properties": ITEM, "required": ["item"], "additionalProperties": False}
TOOLS: Any = [{"name": "count_items", "description": count_items.__doc__, "input_schema": SCHEMA}]
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
# Its methods have no temperature any more.
SETTINGS: Any = {"model": MODEL, "extra_body": {"temperature": 0}, "max_tokens": 200, "system": RULES}


def client(wire: Wire) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=wire.url, auth_token=wire.key, api_key=None, max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_message_calls_a_tool_and_uses_its_result(wire: Wire, stream: bool) -> None:
    kinds: list[str] = []

    def answer(turns: list[Any], **changes: Any) -> Any:
        messages = client(wire).messages
        if not stream:
            return messages.create(messages=turns, tools=TOOLS, **SETTINGS, **changes)
        with messages.stream(messages=turns, tools=TOOLS, **SETTINGS, **changes) as events:
            kinds.extend(event.type for event in events)
            return events.get_final_message()

    named: Any = {"type": "tool", "name": "count_items", "disable_parallel_tool_use": True}
    first = answer(MESSAGES, tool_choice=named if stream else {"type": "any"})
    assert first.stop_reason == "tool_use"
    assert ("input_json" in kinds) == stream
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert set(call.input) == {"item"}
    counted: Any = [{"type": "text", "text": count_items(**call.input)}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": counted if stream else counted[0]["text"]}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = answer(turns)
    assert last.stop_reason == "end_turn"
    assert COUNT in last.content[0].text
    assert last.usage.output_tokens > 0


def test_the_runner_of_tools_runs_them_without_a_thread_that_the_server_would_have_to_keep(wire: Wire) -> None:
    tool = anthropic.beta_tool(count_items)
    runner = client(wire).beta.messages.tool_runner(messages=MESSAGES, tools=[tool], **SETTINGS)
    assert COUNT in runner.until_done().content[-1].text
    assert wire.called == ["count_items"]
    # The server is asked once whether it keeps threads, and refuses as the client expects it.
    [refusal] = wire.refused
    assert "thread_unsupported_request" in refusal
    wire.exchanges = [exchange for exchange in wire.exchanges if "thread" not in exchange.request]


def test_an_answer_has_the_form_that_it_is_parsed_by(wire: Wire) -> None:
    answer = client(wire).messages.parse(messages=MESSAGES, output_format=Stock, **SETTINGS)
    assert isinstance(answer.parsed_output, Stock)


def test_tokens_are_counted_as_a_message_then_uses_them(wire: Wire) -> None:
    body: Any = {"model": MODEL, "messages": MESSAGES, "system": RULES, "tools": TOOLS}
    counted = client(wire).messages.count_tokens(**body).input_tokens
    usage = client(wire).messages.create(max_tokens=1, **body).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_an_error_has_the_clients_own_class(wire: Wire) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client(wire).messages.create(messages=MESSAGES, **SETTINGS | {"max_tokens": -1})
    with pytest.raises(anthropic.NotFoundError):
        client(wire).messages.create(messages=MESSAGES, **SETTINGS | {"model": "claude"})
    wire.exchanges.clear()


def test_pings_before_the_first_token_are_no_text(wire: Wire) -> None:
    messages = client(wire).messages
    asked = {"role": "user", "content": slow_question(words=1800)}
    options: Any = {**SETTINGS, "messages": [asked], "max_tokens": 8}
    with messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
    assert b"event: ping\n" in wire.exchanges[-1].reply
    assert text == messages.create(**options).content[0].text
