"""Chats with tools: which requests are taken, what the template is told, and what clients get of calls."""

import json
import re
from itertools import product
from typing import Any

import jsonschema
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fake_engine import FakeVocabulary
from front_end import CHATS, MESSAGES, RESPONSES, FrontEnd, body_of, check
from specserve.api.chat_template import ChatTemplate
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler


def function(name: str, **fields: Any) -> dict[str, Any]:
    """A tool of OpenAI's chats, or the name of one."""
    return {"type": "function", "function": {"name": name, **fields}}


# A template of a known format, in short.
KNOWN = "{# <tool_call> #}"
TEMPLATE = KNOWN + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"
HELLO = {"role": "user", "content": "hello"}
UNIT, DAY = {"enum": ["celsius", "fahrenheit"]}, {"type": "integer", "minimum": 0, "maximum": 7}
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMA = {**CLOSED, "properties": {"unit": UNIT, "day": DAY}, "required": ["unit"]}
SCHEMAS: dict[str, Any] = {"weather": SCHEMA, "time": CLOSED}
TOOLS: Any = [function(name, parameters=schema) for name, schema in SCHEMAS.items()]
WEATHER = function("weather")
BODY: dict[str, Any] = {"messages": [HELLO], "tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 200}
ONE = {"parallel_tool_calls": False}


def front_end() -> FrontEnd:
    """One with the real compiler of grammars."""
    vocabulary: Any = FakeVocabulary(200)
    return FrontEnd(chat_template=TEMPLATE, grammars=GrammarCompiler(vocabulary))


def answer(**fields: Any) -> Any:
    found = front_end().ask({**BODY, **fields}, CHATS)
    check(ChatCompletion, found)
    return found


def events(**fields: Any) -> list[Any]:
    server = front_end()
    found = server.events(server.answered({**BODY, **fields, "stream": True}, CHATS))
    for event in found:
        check(ChatCompletionChunk, event)
    return found


# A set, which no grammar holds; with each protocol's names around it.
IDS = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
SET = {**CLOSED, "properties": {"ids": IDS}, "required": ["ids"]}
TAKE: dict[str, Any] = {"name": "take", "parameters": SET}
HOSTED = {"type": "web_search"}
OF_PROTOCOLS: dict[str, Any] = {
    CHATS: lambda **more: {"tools": [function(**TAKE, **more)], "tool_choice": "required"},
    RESPONSES: lambda **more: {"tools": [HOSTED, {"type": "function", **TAKE, **more}], "tool_choice": "required"},
    MESSAGES: lambda **more: {"tools": [{"name": "take", "input_schema": SET, **more}], "tool_choice": {"type": "any"}},
}


def test_a_keyword_that_no_grammar_holds_is_named_or_with_strict_refused(caplog: pytest.LogCaptureFixture) -> None:
    for stream, (route, fields) in product([False, True], OF_PROTOCOLS.items()):
        server = front_end()
        caplog.clear()
        body = body_of(route, stream=stream, seed=3, max_tokens=200)
        for more in ({}, {"strict": False}, {"strict": True}):
            request_id = server.answered({**body, **fields(**more)}, route)
            if more.get("strict"):
                assert server.status[request_id] == 400
                assert "The tool 'take' cannot be used: the keyword 'uniqueItems' is not" in server.text(request_id)
            else:
                assert server.status[request_id] == 200
                hosted = "tools[0].web_search, " if route == RESPONSES else ""
                assert server.headers[request_id] == {"x-specserve-ignored": f"{hosted}tools.take.uniqueItems"}
                assert stream or re.search(r"ids.*1.*,.*1", server.text(request_id))
        assert sum("'tools.take.uniqueItems', which is ignored" in record.message for record in caplog.records) == 1


def test_a_call_is_a_field_of_the_message_with_valid_arguments() -> None:
    for seed, choice in [(0, "required"), (1, "required"), (2, WEATHER)]:
        [found] = answer(tool_choice=choice, seed=seed, **ONE)["choices"]
        message = found["message"]
        assert (found["finish_reason"], message["content"]) == ("tool_calls", None)
        [call] = message["tool_calls"]
        assert list(call) == ["id", "type", "function"]
        assert call["id"].startswith("call_")
        assert call["function"]["name"] in ({"weather"} if choice == WEATHER else SCHEMAS)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def told(found: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in found.message.tool_calls]


def test_a_stream_has_the_same_calls_as_the_whole_response_and_names_each_once() -> None:
    """As OpenAI's client reads them."""
    for mode, parallel in [("off", True), ("fixed", False), ("fixed", True)]:
        fields: Any = {"parallel_tool_calls": parallel, "speculation": {"mode": mode}, "temperature": 0}
        whole = ChatCompletion.model_validate(answer(**fields)).choices[0]
        state = ChatCompletionStreamState()
        streamed = events(**fields)
        for event in streamed:
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        snapshot = state.current_completion_snapshot.choices[0]
        assert (snapshot.finish_reason, told(snapshot)) == (whole.finish_reason, told(whole))
        deltas = [event["choices"][0]["delta"] for event in streamed]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert deltas[-1] == {}
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls if "id" in call] == [*range(len(told(whole)))]
        assert ["name" in call["function"] for call in calls] == ["id" in call for call in calls]
        assert len({call["id"] for call in calls if "id" in call}) == len(told(whole)) > 0


def test_calls_in_any_notation_are_json_to_clients() -> None:
    vocabulary: Any = FakeVocabulary(200)
    for mark in ("<tool_call><function=", "<tool_call><arg_key>", "List of tools: ", "<start_function_call>"):
        server = FrontEnd(chat_template=f"{mark}{TEMPLATE}", grammars=GrammarCompiler(vocabulary))
        body = {**BODY, "tool_choice": WEATHER, "temperature": 0, **ONE}
        whole = ChatCompletion.model_validate(server.ask(body, CHATS)).choices[0]
        [(name, arguments)] = told(whole)
        assert (name, whole.finish_reason, whole.message.content) == ("weather", "tool_calls", None)
        jsonschema.validate(json.loads(arguments), SCHEMA)
        state = ChatCompletionStreamState()
        for event in server.events(server.answered({**body, "stream": True}, CHATS)):
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        assert told(state.current_completion_snapshot.choices[0]) == [(name, arguments)]


def test_the_fixed_text_of_calls_is_drafted_by_the_grammar() -> None:
    response = answer(speculation={"mode": "fixed", "drafter": "grammar"}, temperature=0, **ONE)
    drafted = response["speculation"]["drafters"]["grammar"]
    assert drafted["accepted"] == drafted["drafted"] > 20
    plain = answer(speculation={"mode": "off"}, temperature=0, **ONE)
    calls = [found["choices"][0]["message"]["tool_calls"][0]["function"] for found in (response, plain)]
    assert calls[0] == calls[1]


def test_a_call_that_a_stop_string_cuts_is_none_to_run() -> None:
    fields: dict[str, Any] = {"tool_choice": WEATHER, "temperature": 0, **ONE}
    arguments = answer(**fields)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    fields["stop"] = [arguments[len(arguments) // 2 :][:6]]
    for choices in (answer(**fields)["choices"], [event["choices"][0] for event in events(**fields)]):
        assert choices[-1]["finish_reason"] == "stop"


def test_half_a_character_in_arguments_that_come_back_is_a_400() -> None:
    call = {"id": "c", **function("weather", arguments='{"a": "\\ud83d"}')}
    arguments = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    server = FrontEnd(chat_template=TEMPLATE + arguments)
    messages = [HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    status, error = server.refusal({**BODY, "messages": messages, "tool_choice": "auto"}, CHATS)
    assert (status, error["message"].endswith("it is not valid Unicode.")) == (400, True)


def test_with_auto_plain_text_stays_as_it_is() -> None:
    """The fake model never opens a call, so nothing of its answer changes with tools but the prompt."""
    server = front_end()
    fields = {**BODY, "max_tokens": 30, "temperature": 0}
    told = {**fields, "tool_choice": "auto"}
    plain = {**fields, "tools": None, "tool_choice": None, "messages": [{**HELLO, "content": "weather time hello"}]}
    assert server.ask(told, CHATS)["choices"] == server.ask(plain, CHATS)["choices"]


BAD = function("bad", parameters={"not": {}}, strict=True)


def test_tools_that_make_no_sense_are_refused_by_field() -> None:
    server = front_end()
    for fields, param, sentence in (
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "a name of its own"),
        ({"tools": [function("a b")]}, "tools[0].function.name", "pattern"),
        ({"tools": [function("a" * 129)]}, "tools[0].function.name", "pattern"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": function("other")}, "tool_choice", "'other'"),
        ({"grammar": 'root ::= "a"'}, "grammar", "exclude each other"),
        ({"ignore_eos": True}, "ignore_eos", "never let an answer"),
        ({"tools": [BAD]}, "tools", "The tool 'bad' cannot be used: the keyword 'not'"),
    ):
        status, error = server.refusal({**BODY, **fields}, CHATS)
        assert (status, error["param"]) == (400, param)
        assert sentence in error["message"]


def test_allowed_tools_are_those_that_may_be_called() -> None:
    allowed: dict[str, Any] = {"mode": "required", "tools": [WEATHER]}
    fields = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    request = parse_body({**BODY, **fields}, ChatRequest)
    assert request.requires_call
    assert list(request.callable_tools) == ["weather"]
    # The template is told all, so that prompts stay the same.
    assert prompt_of(TEMPLATE, **fields) == "weather time hello"
    allowed["tools"] = [function("other")]
    with pytest.raises(RequestError, match="'other'"):
        parse_body({**BODY, **fields}, ChatRequest)


def prompt_of(source: str, **fields: Any) -> str:
    return ChatTemplate(source, bos="", eos="").prompt(parse_body({**BODY, **fields}, ChatRequest))


def test_the_template_gets_the_tools_unless_none_may_be_called() -> None:
    assert prompt_of(TEMPLATE) == "weather time hello"
    assert prompt_of(TEMPLATE, tool_choice="none") == "hello"
    assert not parse_body({**BODY, "tool_choice": "none"}, ChatRequest).callable_tools
    told = prompt_of(KNOWN + "{% if tools %}{{ tools[1] | tojson }}{% endif %}{{ messages[-1].content }}")
    time = '{"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object"'
    assert told.startswith(time)


CALLS = [
    {"id": "a", **function("weather", arguments='{"unit": "celsius"}')},
    {"id": "b", **function("time", arguments="{broken")},
]
CONVERSATION: Any = [
    {"role": "system", "content": "Be brief."},
    HELLO,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]


def test_the_template_gets_the_arguments_of_calls_as_objects_and_answers_to_them() -> None:
    call = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    shown = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    source = f"{{{{ tools is none }}}}{{% for m in messages %}}[{{{{ m | tojson }}}}]{shown}{{% endfor %}}"
    rendered = prompt_of(source, messages=CONVERSATION, tools=None, tool_choice=None)
    assert '"function": {"name": "weather", "arguments": {"unit": "celsius"}}' in rendered
    assert '"function": {"name": "time", "arguments": "{broken"}' in rendered
    assert '{"role": "tool", "content": "sunny", "tool_call_id": "a"}' in rendered


def test_a_template_without_tools_has_them_in_its_texts() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    rendered = prompt_of(source, messages=CONVERSATION)
    assert rendered.startswith("<system>Be brief.\n\nThese functions can be called:\n")
    assert '"name": "weather"' in rendered
    assert '<tool_call>\n{"name": "the function\'s name", "arguments": {"argument": "value"}}\n</tool_call>' in rendered
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"unit": "celsius"}}\n</tool_call>' in rendered
    assert rendered.endswith("<user><tool_response>\nsunny\n</tool_response>")


def test_a_template_that_shows_calls_in_doubled_braces_shows_them_in_single_ones() -> None:
    """That of Qwen2.5-Coder's larger models, whose models else write calls so."""
    source = (
        '{{- messages[0].content + "\\n<tool_call>\\n'
        '{{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}}\\n</tool_call>" }}'
    )
    text = ChatTemplate(source, bos="", eos="").render([HELLO])
    assert text == 'hello\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
