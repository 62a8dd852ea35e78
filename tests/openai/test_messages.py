"""v1/messages: requests become chats, and answers Anthropic's messages and events (tests/clients/ has its client)."""

import json
from typing import Any

import jsonschema
import pytest

from front_end import ASCII_ONLY, FrontEnd, ScriptedReader, named_events, says
from specserve.api.answer import Arguments, Call, Part, Reasoning, Text
from specserve.api.anthropic import MessagesRequest
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.errors import RequestError

ROUTE, COUNT = "v1/messages", "v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hello"}
GREEDY: dict[str, Any] = {"messages": [HELLO], "max_tokens": 30, "temperature": 0}
# The first token is the end token.
ENDED = {"logit_bias": {"199": 100}}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
LIST = {"name": "list", "input_schema": {"type": "object"}, "type": "custom"}
THOUGHT = Reasoning("I should "), Reasoning("look."), Text("Let me "), Text("see.")
READS = Call(0, "call_a", "read"), Arguments(0, '{"path": '), Arguments(0, '"a.py"}')
PARTS: list[Part] = [*THOUGHT, *READS, Call(1, "call_b", "list")]
CONTENT = [
    {"type": "thinking", "thinking": "I should look.", "signature": ""},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "id": "call_a", "name": "read", "input": {"path": "a.py"}},
    {"type": "tool_use", "id": "call_b", "name": "list", "input": {}},
]


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd(context_length=1024)


def whole(front_end: FrontEnd, **fields: Any) -> Any:
    message = front_end.ask({**GREEDY, **fields}, ROUTE)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny"), message
    assert message["id"].startswith("msg_")
    return message


def streamed(front_end: FrontEnd, **fields: Any) -> list[Any]:
    request_id = front_end.answered({**GREEDY, **fields, "stream": True}, ROUTE)
    assert (front_end.status[request_id], front_end.content_type[request_id]) == (200, "text/event-stream")
    return named_events(front_end.text(request_id))


def accumulated(events: list[Any]) -> Any:
    """The message that Anthropic's client makes of events, which are in order."""
    start, *blocks, last, stop = [event for event in events if event["type"] != "ping"]
    message: Any = start["message"]
    content = message["content"]
    assert (start["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert (content, message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    deltas = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    for event in blocks:
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            assert not content[-1][fields[content[-1]["type"]]]
            text = ""
        kind = content[-1]["type"]
        assert event["index"] == len(content) - 1
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] == deltas[kind]
            text += event["delta"]["partial_json" if kind == "tool_use" else fields[kind]]
        elif event["type"] == "content_block_stop":
            content[-1][fields[kind]] = json.loads(text or "{}") if kind == "tool_use" else text
    return message | last["delta"] | {name: last[name] for name in ("usage", "speculation")}


def chat_of(**fields: Any) -> ChatRequest:
    return parse_body({**GREEDY, **fields}, MessagesRequest).chat()


def messages_of(*messages: Any, **fields: Any) -> list[Any]:
    chat = chat_of(messages=[*messages], **fields)
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_what_is_streamed_is_what_is_whole(front_end: FrontEnd) -> None:
    fields: dict[str, Any]
    for fields in (
        {"max_tokens": 1, "inference_geo": "us"},
        ENDED,
        {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}},
        {"system": "Be brief.", "top_k": 5, "top_p": 0.9, "metadata": {"user_id": "x" * 600}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "high"}},
        {"context_management": {"edits": []}, "mcp_servers": [], "container": None, "betas": ["x"]},
    ):
        message, same = whole(front_end, **fields), accumulated(streamed(front_end, **fields))
        assert same.keys() == message.keys()
        assert same["usage"]["output_tokens"] == message["usage"]["output_tokens"]
        assert same["speculation"].keys() == message["speculation"].keys()
        varying = dict.fromkeys(("id", "usage", "speculation"))
        assert same | varying == message | varying, fields


def test_input_tokens_are_those_that_were_not_cached(front_end: FrontEnd) -> None:
    first, second = (whole(front_end)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == first["cache_creation_input_tokens"] == 0
    assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, first["input_tokens"] - 1)
    start, *_ = streamed(front_end)
    assert start["message"]["usage"]["cache_read_input_tokens"] == first["input_tokens"] - 1


def test_what_claude_code_says_of_itself_is_no_part_of_the_prompt(front_end: FrontEnd) -> None:
    """It differs from conversation to conversation and stands first, so nothing after it would be cached."""
    rules = {"type": "text", "text": "You are an agent. " * 10}
    first = whole(front_end, system=[rules])
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0a1; cc_entrypoint=cli; cch=5d;"}
    usage = whole(front_end, system=[billing, rules])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, first["usage"]["input_tokens"] - 1)
    assert messages_of(HELLO, system=[billing]) == messages_of(HELLO)


def test_stop_reasons(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only: dict[str, Any] = {"logit_bias": ASCII_ONLY, "max_tokens": 14}
    text = whole(front_end, **ascii_only)["content"][0]["text"]
    ended = whole(front_end, **ENDED)
    assert (ended["stop_reason"], ended["content"]) == ("end_turn", [{"type": "text", "text": ""}])
    cut = whole(front_end, **ascii_only, stop_sequences=["never"])
    assert (cut["stop_reason"], cut["stop_sequence"], cut["content"][0]["text"]) == ("max_tokens", None, text)
    stops = {**ascii_only, "stop_sequences": ["never", text[9:12]]}
    for stopped in (whole(front_end, **stops), accumulated(streamed(front_end, **stops))):
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[9:12])
        assert stopped["content"] == [{"type": "text", "text": text[: text.index(text[9:12])]}]
    ScriptedReader(PARTS).install(monkeypatch)
    assert whole(front_end, tools=[READ, LIST], **ENDED)["stop_reason"] == "tool_use"


def test_thinking_text_and_uses_of_tools_are_blocks(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedReader(PARTS).install(monkeypatch)
    assert whole(front_end, tools=[READ, LIST])["content"] == CONTENT
    events = streamed(front_end, tools=[READ, LIST])
    assert accumulated(events)["content"] == CONTENT
    assert [event["type"] for event in events[:3]] == ["message_start", "content_block_start", "ping"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta.get("partial_json") for delta in deltas[4:]] == ['{"path": ', '"a.py"}']


def test_a_use_that_is_cut_has_the_input_that_came(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stop sequence cuts it, it is none to run; arguments that are no JSON object end no worker."""
    for arguments, cut, given in (
        ('{"path": "a.p', True, {"path": "a.p"}),
        *((arguments, False, {}) for arguments in ('{"path": "\\ud800"}', '{"path": tru', "[1]", "{" * 1000)),
    ):
        ScriptedReader([Call(0, "call_a", "read"), Arguments(0, arguments)], cut=cut).install(monkeypatch)
        message = whole(front_end, tools=[READ], **ENDED)
        assert (message["content"][0]["input"], message["stop_reason"]) == (given, "end_turn" if cut else "tool_use")
        [delta] = [event["delta"] for event in streamed(front_end, tools=[READ], **ENDED) if "delta" in event][:-1]
        assert delta == {"type": "input_json_delta", "partial_json": arguments}


def test_a_conversation_with_tools_becomes_messages_of_a_chat() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": "call_b", "content": "No such directory.", "is_error": True},
        {"type": "tool_result", "tool_use_id": "call_c"},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    secret = {"type": "redacted_thinking", "data": "xyz"}
    messages = messages_of(
        HELLO,
        {"role": "assistant", "content": [secret, *CONTENT]},
        {"role": "user", "content": results},
        {"role": "system", "content": "Be quick."},
        {"role": "assistant", "content": [secret]},  # nothing that the model could read
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    )
    system, user, assistant, *results, more, reminder = messages
    assert (system, user) == ({"role": "system", "content": "Be brief."}, HELLO)
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "I should look.")
    first, second = assistant["tool_calls"]
    assert (first["id"], first["function"]["name"]) == ("call_a", "read")
    assert (second["id"], second["function"]["name"]) == ("call_b", "list")
    assert [json.loads(call["function"]["arguments"]) for call in (first, second)] == [{"path": "a.py"}, {}]
    contents = {"call_a": "1", "call_b": "Error: No such directory.", "call_c": ""}
    assert results == [{"role": "tool", "tool_call_id": call, "content": text} for call, text in contents.items()]
    assert more == {"role": "user", "content": "Go on."}
    assert reminder == {"role": "system", "content": "Be quick."}


def test_a_text_of_the_assistant_at_the_end_begins_the_answer(front_end: FrontEnd) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "Well,"}]}
    called = {"role": "assistant", "content": [CONTENT[2]]}
    assert chat_of(messages=[HELLO, begun]).continue_final_message
    assert not chat_of(messages=[HELLO]).continue_final_message
    assert not chat_of(messages=[HELLO, called]).continue_final_message
    plain, longer = (front_end.ask({"messages": said}, COUNT)["input_tokens"] for said in ([HELLO], [HELLO, begun]))
    # The template begins the assistant's message with "assistant: ".
    assert longer - plain == len("Well,")


def test_fields_that_are_ignored_are_named_but_for_hints(front_end: FrontEnd) -> None:
    fields = {"context_management": {}, "tools": [{"type": "web_search_20250305", "name": "web_search"}, READ]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    system = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    ignored = {"x-specserve-ignored": "context_management, tools[0].web_search_20250305"}
    for route in (ROUTE, COUNT):
        request_id = front_end.answered({**GREEDY, **fields, "thinking": thinking, "system": system}, route)
        assert front_end.headers[request_id] == ignored


def test_fields_become_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    chat = chat_of(
        tools=[READ, LIST],
        tool_choice={"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        stop_sequences=["a", "b"],
        top_k=3,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": None, "prompt_family": "code"},
    )
    read, listing = (tool.model_dump(exclude_none=True)["function"] for tool in chat.tools or [])
    assert read == {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}
    assert listing == {"name": "list", "parameters": {"type": "object"}}
    assert chat.model_dump(exclude_none=True)["tool_choice"] == {"type": "function", "function": {"name": "read"}}
    assert (chat.parallel_tool_calls, chat.stop, chat.top_k, chat.max_tokens) == (False, ["a", "b"], 3, 30)
    assert chat.answer_schema == schema
    assert (chat.chat_template_kwargs, chat.metadata) == ({"enable_thinking": True}, {"prompt_family": "code"})
    assert chat_of(output_format={"type": "json_schema", "schema": schema}).response_format == chat.response_format
    assert chat_of(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    assert chat_of().chat_template_kwargs is None
    for choice, of_chat in {"auto": "auto", "any": "required", "none": "none"}.items():
        assert chat_of(tools=[READ], tool_choice={"type": choice}).tool_choice == of_chat


INSERT = {"command": "insert", "path": "a.py", "insert_line": 0}
VIEW = {"command": "view", "path": "a.py"}
UNDO = {"command": "undo_edit", "path": "a.py"}
RENAME = {"command": "rename", "old_path": "a", "new_path": "b"}
# By type of a tool that clients run: inputs that its schema takes, and some that it refuses.
CLIENT_RUN: dict[str, tuple[list[Any], list[Any]]] = {
    "bash_20250124": ([{"command": "ls"}, {"restart": True}], [{}, {"command": 1}, {"command": "ls", "x": 1}]),
    "text_editor_20250728": ([VIEW, {**VIEW, "view_range": [1, 9]}, {**INSERT, "insert_text": "a"}], [UNDO, INSERT]),
    "text_editor_20250124": ([UNDO, {**INSERT, "new_str": "a"}], [RENAME]),
    "memory_20250818": ([RENAME, VIEW], [{"command": "rename"}]),
}


def test_tools_that_anthropics_clients_run_are_offered_with_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(context_length=4096)
    for kind, (valid, invalid) in CLIENT_RUN.items():
        own = {"type": kind, "name": "own"}
        [tool] = chat_of(tools=[own], tool_choice={"type": "tool", "name": "own"}).tools or []
        assert (tool.function.name, bool(tool.function.description)) == ("own", True)
        validator = jsonschema.Draft202012Validator(tool.function.parameters or {})
        assert all(map(validator.is_valid, valid))
        assert not any(map(validator.is_valid, invalid))
        ScriptedReader([Call(0, "call_a", "own"), Arguments(0, json.dumps(valid[0]))]).install(monkeypatch)
        message = whole(front_end, tools=[own], **ENDED)
        assert message["content"] == [{"type": "tool_use", "id": "call_a", "name": "own", "input": valid[0]}]
    with pytest.raises(RequestError, match="'computer_20250124'") as refusal:
        chat_of(tools=[READ, {"type": "computer_20250124", "name": "computer"}])
    assert refusal.value.param == "tools"


def test_what_cannot_be_done_is_anthropics_error_before_the_stream(front_end: FrontEnd) -> None:
    # What cannot be done, and what the error says.
    for fields, words in (
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (says([{"type": "image", "source": {}}]), "'messages[0].content[0]': must be a part of type 'text' or "),
        (says([{"type": "document"}]), "messages"),
        (says("\ud800"), "messages"),
        (says("x" * 2000), "prompt is too long: 2018 tokens > 1024 maximum"),
        (says("x", role="robot"), "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"model": "claude-opus-9"}, "this server has tiny"),
        ({"thread": {"type": "new"}}, "keeps no threads"),
    ):
        for stream in (False, True):
            status, error = front_end.refusal({**GREEDY, **fields, "stream": stream}, ROUTE)
            kind = (404, "not_found_error") if "model" in fields else (400, "invalid_request_error")
            assert (status, error["type"]) == kind
            assert words in error["message"], error
            # By this code Anthropic's client sends whole conversations.
            assert ("details" in error) == ("thread" in fields)
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    for body in (b"{", b"[]", None):
        request_id = front_end.answered(body, COUNT)
        answer = front_end.answer(request_id)
        assert (front_end.status[request_id], front_end.content_type[request_id]) == (400, "application/json")
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")


def test_a_stream_begins_while_its_prompt_is_read(front_end: FrontEnd) -> None:
    """Agents' prompts are long, and their clients wait some minutes for a first event."""
    firsts = {"message_start", "response.created", "response.in_progress"}
    for route, body in {ROUTE: says("abcd" * 30), "v1/responses": {"input": "dcba" * 30}}.items():
        front_end.begin({"prompt": "ab", "max_tokens": 100, "ignore_eos": True}, "v1/completions")
        request = front_end.post({**body, "max_tokens": 5, "ignore_eos": True, "stream": True}, route)
        while not front_end.text(request):
            front_end.handle_once()
        assert {event["type"] for event in named_events(front_end.text(request))} <= firsts
        front_end.run()
        assert front_end.status[request] == 200


def test_a_stream_that_fails_ends_with_an_error_event(front_end: FrontEnd) -> None:
    *events, error = named_events(front_end.failed_stream(GREEDY, ROUTE))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    begun = {"message_start", "content_block_start", "ping", "content_block_delta"}
    assert {event["type"] for event in events} <= begun


def test_tokens_are_counted_without_generating(front_end: FrontEnd) -> None:
    question = {"messages": [HELLO], "system": "Be brief.", "tools": [READ]}
    counted = front_end.ask(question, COUNT)
    assert counted == {"input_tokens": whole(front_end, **question)["usage"]["input_tokens"]}
    _, error = front_end.refusal({**question, "model": "claude"}, COUNT)
    assert error["type"] == "not_found_error"
