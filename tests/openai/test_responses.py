"""v1/responses: requests become chats, and answers OpenAI's items, which OpenAI's own types and client read."""

import json
from typing import Any

import jsonschema
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import test_messages
from front_end import ASCII_ONLY, FrontEnd, ScriptedReader, named_events
from specserve.api.answer import Arguments, Call, Part
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.api.responses import ResponsesRequest
from specserve.errors import RequestError

ROUTE = "v1/responses"
GREEDY: dict[str, Any] = {"input": "hello", "max_output_tokens": 30, "temperature": 0}
SHORT = {**GREEDY, "max_output_tokens": 2}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = {"type": "input_text", "text": "a"}
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
PATCHES = Call(1, "call_b", "patch"), Arguments(1, '{"input": "+ a\\n'), Arguments(1, '+ b"}')
PARTS: list[Part] = [*test_messages.THOUGHT, *test_messages.READS, *PATCHES]


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd(responses_store=2, context_length=1024)


def whole(front_end: FrontEnd, **fields: Any) -> Any:
    """The whole response to a greedy request, which has OpenAI's form."""
    answer = front_end.ask({**GREEDY, **fields}, ROUTE)
    Response.model_validate(answer)
    return answer


def streamed(front_end: FrontEnd, **fields: Any) -> list[Any]:
    """The events of the stream of a greedy request, which have OpenAI's forms and numbers."""
    request_id = front_end.answered({**GREEDY, **fields, "stream": True}, ROUTE)
    assert (front_end.status[request_id], front_end.content_type[request_id]) == (200, "text/event-stream")
    events = named_events(front_end.text(request_id))
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert EVENTS.validate_python(event).type == event["type"]
    return events


def timeless(response: Any) -> Any:
    """A response without what differs between two runs."""
    text = json.dumps({**response, "created_at": 0, "speculation": {}, "usage": response["usage"] and 0})
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "ID"))


def chat_of(**fields: Any) -> ChatRequest:
    request = parse_body({"input": "hello", **fields}, ResponsesRequest)
    return request.chat(request.messages())


def names_of(chat: ChatRequest) -> list[str]:
    return [tool.function.name for tool in chat.tools or []]


def messages_of(**fields: Any) -> list[Any]:
    return [message.model_dump(exclude_none=True) for message in chat_of(**fields).messages]


def test_what_is_streamed_is_what_is_whole(front_end: FrontEnd) -> None:
    fields: dict[str, Any]
    for fields in (
        {},
        {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}},
        {"metadata": {"a": "b"}, "user": "u", "store": False, "parallel_tool_calls": False, "truncation": "auto"},
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "seed": 1},
    ):
        answer, events = whole(front_end, **fields), streamed(front_end, **fields)
        assert timeless(events[-1]["response"]) == timeless(answer), fields
        assert events[-1]["type"] == f"response.{answer['status']}"
        [item] = answer["output"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == item["content"][0]["text"]


def test_a_response_repeats_its_request_and_counts_tokens(front_end: FrontEnd) -> None:
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": [READ, {"type": "mcp"}], "top_p": 0.5}
    answer, again = (whole(front_end, **fields, tool_choice="none") for _ in range(2))
    assert [answer[name] for name in ("instructions", "metadata", "top_p")] == ["Be brief.", {"a": "b"}, 0.5]
    assert [tool["name"] for tool in answer["tools"]] == ["read"]
    assert (answer["tool_choice"], answer["model"], answer["object"]) == ("none", "tiny", "response")
    usage = answer["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (30, usage["input_tokens"] + 30)
    assert answer["speculation"]["rounds"] > 0
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


def test_an_answer_is_incomplete_if_it_is_cut(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = whole(front_end)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in cut["output"]] == ["incomplete"]
    ended = whole(front_end, logit_bias={"199": 100})
    assert (ended["status"], ended["incomplete_details"]) == ("completed", None)
    assert [(item["status"], item["content"][0]["text"]) for item in ended["output"]] == [("completed", "")]
    # A stop string may end a call within its arguments.
    ScriptedReader([Call(0, "call_a", "read"), Arguments(0, '{"path": "a.p')], cut=True).install(monkeypatch)
    response = whole(front_end, tools=[READ], logit_bias={"199": 100})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": None})
    assert response["output"][0]["status"] == "incomplete"


def test_reasoning_text_and_calls_are_openais_items(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedReader(PARTS).install(monkeypatch)
    fields = {"tools": [READ, PATCH], "logit_bias": {"199": 1}}
    answer = whole(front_end, **fields)
    reasoning, message, call, custom = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I should look."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_a", "read", '{"path": "a.py"}')
    assert (custom["type"], custom["call_id"], custom["input"]) == ("custom_tool_call", "call_b", "+ a\n+ b")
    assert len({item["id"] for item in answer["output"]}) == 4
    assert [item["status"] for item in answer["output"]] == [*["completed"] * 3, "incomplete"]
    events = streamed(front_end, **fields)
    assert timeless(events[-1]["response"])["output"] == timeless(answer)["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    part, ends = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events[:-1]] == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *ends),
        *(*part, "output_text.delta", "output_text.delta", "output_text.done", *ends),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
    ]


def test_the_reasoning_of_a_model_that_thinks_is_an_item_and_counted() -> None:
    front_end = FrontEnd(chat_template="{{ messages[0].content.split('</think>')[-1] }}<think>\n")
    events = streamed(front_end)
    response = events[-1]["response"]
    reasoning, message = response["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning["content"][0]["text"] != ""
    assert message["content"][0]["text"] == ""
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == response["usage"]["output_tokens"]


def test_an_answer_comes_back_as_one_message(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedReader(PARTS).install(monkeypatch)
    items: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        output = whole(front_end, input=items, tools=[READ, PATCH])["output"]
        calls = [item for item in output if item["type"].endswith("_call")]
        items += output
        items += [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"} for item in calls]
    user, first, *results, second, _, _ = messages_of(input=items)
    assert user == {"role": "user", "content": "hello"}
    assert first == second
    assert (first["content"], first["reasoning_content"]) == ("Let me see.", "I should look.")
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in first["tool_calls"]]
    assert called == [("read", {"path": "a.py"}), ("patch", {"input": "+ a\n+ b"})]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", "call_a"), ("tool", "call_b")]


def test_items_become_messages() -> None:
    said = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi.", "annotations": []}]},
        {"role": "assistant", "content": "There."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well."}]},
    ]
    called = [
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT, TEXT]},
        # `local_shell` may name its call so, and `apply_patch` may have no text.
        {"type": "local_shell_call_output", "id": "c", "output": "b"},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
    ]
    # The input of a request, and the roles and contents of its chat's messages.
    for items, expected in (
        ("hello", [("user", "hello")]),
        ([{"role": "user", "content": "hello"}], [("user", "hello")]),
        ([{"type": "message", "content": [TEXT]}], [("user", "a")]),
        (said, [("assistant", "Hi."), ("assistant", "There.")]),
        (called, [("assistant", None), ("tool", "aa"), ("tool", "b"), ("tool", "failed")]),
    ):
        messages = messages_of(input=items)
        assert [(message["role"], message.get("content")) for message in messages] == expected
        assert {message["tool_call_id"] for message in messages if message["role"] == "tool"} <= {"c"}
    # Chat templates take one system message, the first; later ones stay where they are.
    roles = {"developer": "Two.", "user": "hello", "system": "Three."}
    items = [{"role": role, "content": content} for role, content in roles.items()]
    system, user, later = messages_of(instructions="One.", input=items)
    assert (system, user["content"]) == ({"role": "system", "content": "One.\n\nTwo."}, "hello")
    assert later == {"role": "system", "content": "Three."}


def test_the_fields_of_other_routes_keep_their_meaning() -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 5, "seed": 3, "stop": "x"}
    for chat in (chat_of(**fields, grammar=None), test_messages.chat_of(**fields, grammar=None)):
        assert chat.model_dump(include={*fields}, exclude_none=True) == fields


def test_fields_become_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    numbers = {"max_output_tokens": 7, "top_p": 0.5, "seed": 3}
    chat = chat_of(
        parallel_tool_calls=False,
        tools=[READ, PATCH],
        tool_choice={"type": "function", "name": "read"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        **numbers,
    )
    assert names_of(chat) == ["read", "patch"]
    read = {"type": "function", "function": {"name": "read"}}
    assert chat.model_dump(include={"tool_choice"}, exclude_none=True) == {"tool_choice": read}
    assert (chat.max_tokens, chat.top_p, chat.seed, chat.reasoning_effort) == (7, 0.5, 3, "low")
    assert chat.parallel_tool_calls is False
    assert chat.answer_schema == schema
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    chosen = chat_of(tools=[READ], tool_choice=allowed).model_dump(exclude_none=True)["tool_choice"]["allowed_tools"]
    assert chosen == {"mode": "required", "tools": [read]}


def test_a_custom_tool_is_a_function_of_its_input_that_knows_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    [tool] = chat_of(tools=[{**PATCH, "format": grammar}]).tools or []
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert tool.function.parameters == schema
    assert tool.function.description == "Edits files.\nThe input follows this grammar:\nstart: /a+/"


def test_tools_of_providers_servers_are_ignored_unless_the_request_demands_one() -> None:
    openais = ("web_search", "file_search", "code_interpreter", "mcp", "tool_search")
    anthropics = ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825")
    named: dict[str, Any] = {"type": "tool", "name": "x"}
    protocols: list[tuple[Any, Any, str, Any, Any]] = [
        *((chat_of, READ, kind, {"type": kind}, "required") for kind in openais),
        *((test_messages.chat_of, test_messages.READ, kind, named, {"type": "any"}) for kind in anthropics),
    ]
    for chat, own, kind, this, any_tool in protocols:
        hosted = {"type": kind, "name": "x", "anything": {"else": 1}}
        assert names_of(chat(tools=[hosted, own])) == ["read"]
        assert chat(tools=[hosted]).tools is None
        for tools, choice in (([hosted, own], this), ([hosted], any_tool)):
            with pytest.raises(RequestError) as refusal:
                chat(tools=tools, tool_choice=choice)
            assert refusal.value.param == "tool_choice"
    shells = [{"type": "shell", "environment": {"type": kind}} for kind in ("container_auto", "local")]
    assert [names_of(chat_of(tools=[shell])) for shell in shells] == [[], ["shell"]]


def test_calls_of_a_namespaces_tools_name_it(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Codex has them; the same name may be that of another tool."""
    tools = [READ, {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [READ, PATCH]}]
    assert names_of(chat_of(tools=tools)) == ["read", "crm__read", "crm__patch"]
    calls = {"crm__read": "{}", "read": "{}", "crm__patch": '{"input": "+"}'}
    parts: list[Part] = []
    for index, (name, arguments) in enumerate(calls.items()):
        parts += [Call(index, f"call_{index}", name), Arguments(index, arguments)]
    ScriptedReader(parts).install(monkeypatch)
    response = whole(front_end, tools=tools)
    own, others, custom = ((call["type"], call["name"], call.get("namespace")) for call in response["output"])
    assert (own, others) == (("function_call", "read", "crm"), ("function_call", "read", None))
    assert custom == ("custom_tool_call", "patch", "crm")
    assert timeless(streamed(front_end, tools=tools)[-1]["response"])["output"] == timeless(response)["output"]
    [message] = messages_of(input=response["output"], tools=tools)
    assert [call["function"]["name"] for call in message["tool_calls"]] == [*calls]


EXITED = '{"stdout":"a.py","stderr":"","outcome":{"type":"exit","exit_code":0}}'
# Tools that clients run: the field of their arguments, these, an output, and what the model reads of it.
CLIENT_RUN: dict[str, tuple[str, Any, Any, str]] = {
    "shell": ("action", {"commands": ["ls"], "timeout_ms": 100}, [json.loads(EXITED)], EXITED),
    "local_shell": ("action", {"type": "exec", "command": ["ls"], "env": {}}, "a.py", "a.py"),
    "apply_patch": ("operation", {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}, "done", "done"),
}


def test_calls_of_tools_that_openais_clients_run_are_items_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(context_length=2048)
    for kind, (field, arguments, output, text) in CLIENT_RUN.items():
        [tool] = chat_of(tools=[{"type": kind}], tool_choice={"type": kind}).tools or []
        assert tool.function.name == kind
        jsonschema.validate(arguments, tool.function.parameters or False)
        ScriptedReader([Call(0, "call_a", kind), Arguments(0, json.dumps(arguments))]).install(monkeypatch)
        fields = {"tools": [{"type": kind}], "logit_bias": {"199": 100}}
        [item] = whole(front_end, **fields)["output"]
        assert (item["type"], item["call_id"], item[field]) == (f"{kind}_call", "call_a", arguments)
        events = streamed(front_end, **fields)
        assert [event["type"] for event in events[2:-1]] == ["response.output_item.added", "response.output_item.done"]
        assert events[-1]["response"]["output"][0][field] == arguments
        back = {**item, field: {**arguments, "user": None}}
        call, result = messages_of(input=[back, {"type": f"{kind}_call_output", "call_id": "call_a", "output": output}])
        assert call["tool_calls"][0]["function"] == {"name": kind, "arguments": json.dumps(arguments)}
        assert result == {"role": "tool", "tool_call_id": "call_a", "content": text}
    with pytest.raises(RequestError, match="'computer'") as refusal:
        chat_of(tools=[READ, {"type": "computer"}])
    assert refusal.value.param == "tools"


def test_fields_and_tools_that_are_ignored_are_named(front_end: FrontEnd) -> None:
    tools = [READ, {"type": "web_search", "external_web_access": False}]
    back = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": "Hi."}
    inside = {"text": {"fromat": {}, "verbosity": "low"}, "reasoning": {"effort": "low", "sumary": "auto"}}
    request_id = front_end.answered({**GREEDY, "input": [back], "tools": tools, "moderation": True, **inside}, ROUTE)
    ignored = "moderation, tools[1].web_search, text.fromat, text.verbosity, reasoning.sumary"
    assert front_end.headers[request_id] == {"x-specserve-ignored": ignored}


IMAGE = {"role": "user", "content": [TEXT, {"type": "input_image", "image_url": "x"}]}
UNUSABLE: dict[str, Any] = {
    "input": None,
    "background": True,
    "n": 2,
    "top_logprobs": 1,
    "temperature": 3,
    "tool_choice": "sometimes",
}


def test_what_cannot_be_done_is_openais_error_before_the_stream(front_end: FrontEnd) -> None:
    # What cannot be done, the field that the error names, and what it says.
    for fields, param, words in (
        *(({field: value}, field, "") for field, value in UNUSABLE.items()),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "'item_reference', which is not supported."),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "'web_search_call'"),
        ({"input": [IMAGE]}, "input[0].content[1]", "; images, audio and files are not supported."),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'developer'"),
        ({"input": "\ud800"}, "input", ""),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "v1/chat/completions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", ""),
        ({"text": {"format": {"type": "xml"}}}, "text.format", ""),
        ({"input": "x" * 2000}, "input", "maximum context length"),
        ({"max_output_tokens": -1}, "max_output_tokens", ""),
        ({"model": "gpt-9"}, "model", "this server has tiny"),
    ):
        for stream in (False, True):
            status, error = front_end.refusal({**GREEDY, **fields, "stream": stream}, ROUTE)
            assert (status, error["type"]) == (404 if "model" in fields else 400, "invalid_request_error"), fields
            assert error["param"] == param
            assert words in error["message"]


def test_a_stream_that_fails_ends_with_response_failed(front_end: FrontEnd) -> None:
    *events, failed = named_events(front_end.failed_stream(GREEDY, ROUTE))
    EVENTS.validate_python(failed)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert {event["type"] for event in events}.isdisjoint({"response.completed", "response.incomplete"})


def test_a_response_continues_one_that_the_server_has_kept(front_end: FrontEnd) -> None:
    first = whole(front_end, input="one", logit_bias=ASCII_ONLY)
    text = first["output"][0]["content"][0]["text"]
    asked = {"input": "two", "instructions": "Be brief."}
    second = streamed(front_end, **asked, previous_response_id=first["id"])[-1]["response"]
    items = [("user", "one"), ("assistant", text), ("user", "two")]
    spelled = [{"role": role, "content": content} for role, content in items]
    same = whole(front_end, **{**asked, "input": spelled}, store=False)
    assert second["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    assert second["output"][0]["content"] == same["output"][0]["content"]
    assert second["previous_response_id"] == first["id"]
    third = whole(front_end, input="three", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def gone(front_end: FrontEnd, response_id: str, **headers: str) -> bool:
    """Whether a client cannot continue a response."""
    error = front_end.ask({**SHORT, "store": False, "previous_response_id": response_id}, ROUTE, **headers)["error"]
    return bool(error and error["code"] == "previous_response_not_found")


def test_a_response_is_kept_for_the_clients_with_its_api_key_alone(front_end: FrontEnd) -> None:
    kept = front_end.ask(SHORT, ROUTE, authorization="Bearer mine")["id"]
    assert gone(front_end, kept, authorization="Bearer other")
    assert not gone(front_end, kept, authorization="Bearer mine")


def test_the_responses_that_were_used_last_are_kept(front_end: FrontEnd) -> None:
    first, second = (whole(front_end, **SHORT)["id"] for _ in range(2))
    unstored = whole(front_end, **SHORT, store=False)["id"]
    used = whole(front_end, **SHORT, previous_response_id=first)["id"]
    assert all(gone(front_end, each) for each in (second, unstored, "resp_never"))
    assert not any(gone(front_end, each) for each in (first, used))


def test_a_server_without_a_store_says_so() -> None:
    front_end = FrontEnd()
    status, error = front_end.refusal({**GREEDY, "previous_response_id": whole(front_end)["id"]}, ROUTE)
    assert (status, error["param"]) == (400, "previous_response_id")
    assert error["message"] == "This server keeps no responses: send the whole conversation as 'input'."
