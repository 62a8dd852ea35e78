"""Known fields of OpenAI's, vLLM's and llama.cpp's, by their other names and forms; and what unknown ones lead to."""

from typing import Any
from unittest import mock

import pytest

from fake_engine import FakeVocabulary
from front_end import CHATS, COMPLETIONS, FrontEnd, body_of
from specserve.api.parse import parse_body
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.errors import RequestError
from test_requests import CONFIG, refusal, resolved

COMPLETION, CHAT = body_of(COMPLETIONS), body_of(CHATS)
KINDS: dict[Any, dict[str, Any]] = {CompletionRequest: COMPLETION, ChatRequest: CHAT}
# By field: values that leave the answer as it is, and values that would not. The first are about something else.
ANY: tuple[list[Any], list[Any]] = (["u", 5, {"a": [1]}], [])
OFF: tuple[list[Any], list[Any]] = ([False, 0, [], {}], [True, 0.5, ["a"], {"a": 1}])
NONE: tuple[list[Any], list[Any]] = ([], [{}, 0, "a"])
NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(("user", "store", "service_tier", "safety_identifier", "prompt_cache_key"), ANY),
    **dict.fromkeys(("functions", "audio", "documents", "bad_words", "n_probs", "lora", "guided_json_object"), OFF),
    **dict.fromkeys(("guided_json", "guided_choice", "truncate_prompt_tokens", "prompt_logprobs"), NONE),
    "best_of": ([1], [2]),
    "modalities": ([["text"]], [["audio"], ["text", "audio"]]),
    "typical_p": ([1, 1.0], [0.9]),
}
CHATS_ONLY = {"echo": ([False], [True]), "add_special_tokens": ([False], [True])}


def description(kind: type[Any], body: dict[str, Any]) -> list[Any]:
    """What a request's sequence is made of."""
    [sequence] = resolved(parse_body(body, kind), [Prompt([1, 2], "")])
    return [sequence.sampling, sequence.speculation, sequence.max_tokens, sequence.top_logprobs]


def ignored_of(body: dict[str, Any], kind: type[Any] = CompletionRequest) -> list[str]:
    """The fields of a valid body that are named as ignored."""
    ignored: list[str] = parse_body(body, kind).ignored
    return ignored


def test_a_value_that_leaves_the_answer_as_it_is_is_taken_and_others_are_a_400_that_names_the_field() -> None:
    for kind, body in KINDS.items():
        plain = description(kind, {**body, "seed": 1})
        for name, (neutral, effective) in (NEUTRAL | (CHATS_ONLY if kind is ChatRequest else {})).items():
            for value in [None, *neutral]:
                assert description(kind, {**body, "seed": 1, name: value}) == plain
                assert ignored_of({**body, name: value}, kind) == []
            for value in effective:
                with pytest.raises(RequestError) as refused:
                    parse_body({**body, name: value}, kind)
                assert (refused.value.status, refused.value.param) == (400, name)
                assert refused.value.code == "unsupported_value"


def test_the_window_of_penalties_changes_nothing_without_one() -> None:
    for fields in ({}, {"repeat_penalty": 1.0}, {"presence_penalty": 0, "frequency_penalty": None}):
        assert ignored_of({**COMPLETION, **fields, "repeat_last_n": 64}) == []
    for name in ("repeat_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        parse_body({**COMPLETION, name: 1.1, "repeat_last_n": -1}, CompletionRequest)
        error = refusal({**COMPLETION, name: 1.1, "repeat_last_n": 64})
        assert error.param == "repeat_last_n"
        assert error.message == "'repeat_last_n' is not supported by this server: it can only be -1."


def test_an_error_names_the_field_that_was_sent_and_says_what_can_be_sent_instead() -> None:
    for fields, param, sentence in (
        ({"n_predict": "a"}, "n_predict", "integer."),
        ({"n_predict": 5, "max_tokens": "a"}, "max_tokens", "integer."),
        ({"repeat_penalty": 0}, "repeat_penalty", "0.01."),
        ({"functions": [{}]}, "functions", "by this server: use 'tools'."),
        ({"guided_json": {}}, "guided_json", "by this server: use 'structured_outputs'."),
        ({"modalities": ["audio"]}, "modalities", 'it can only be ["text"].'),
    ):
        error = refusal({**COMPLETION, **fields})
        assert (error.param, error.message.endswith(sentence)) == (param, True), error.message
        assert f"'{param}'" in error.message


def test_a_text_is_only_begun_with_special_tokens_if_the_request_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = FakeVocabulary(200)
    monkeypatch.setattr(vocabulary, "encode", lambda text, *, special, begin: [1, special, begin, len(text)])
    for fields, begins in (({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)):
        [prompt] = Tokenizer(vocabulary, CONFIG).completion(parse_body({**COMPLETION, **fields}, CompletionRequest))
        assert prompt.tokens == [1, True, begins, 5]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def asked(fields: dict[str, Any]) -> list[Any]:
    """What the compiler of grammars is asked for."""
    compiler: Any = mock.Mock()
    parse_body({**COMPLETION, **fields}, CompletionRequest).constraint(compiler)
    return list(compiler.mock_calls)


def test_each_name_of_a_structure_means_the_same() -> None:
    for fields, same in (
        ({"structured_outputs": {"json": '{"type": "string"}'}}, {"json_schema": {"type": "string"}}),
        ({"json_schema": SCHEMA}, {"response_format": AS_SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"response_format": AS_SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"response_format": AS_SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"response_format": AS_SCHEMA}),
        ({"response_format": {**AS_SCHEMA, "schema": {}}}, {"response_format": AS_SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"grammar": 'root ::= "a"', "regex": None}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"choice": ["yes", 'n"\\\n']}}, {"grammar": r'root ::= "yes" | "n\x22\x5c\x0a"'}),
        ({"structured_outputs": {"json_object": False}, "response_format": {"type": "text"}}, {}),
    ):
        assert asked(fields) == asked(same), fields
        assert bool(asked(fields)) == bool(same)
        assert ignored_of({**COMPLETION, **fields}) == []


def test_unknown_fields_are_found_wherever_they_are() -> None:
    unknown = {"temprature": 1, "speculation": {"mode": "off", "tempo": 1}, "": 2}
    assert ignored_of({**COMPLETION, **unknown}) == ["temprature", "", "speculation.tempo"]
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "weight": 2}]}
    body = {"messages": [*CHAT["messages"], {**message, "colour": "red"}], "stream": True, "stream_options": {"a": 1}}
    inside = ["messages[1].colour", "messages[1].content[1].weight"]
    assert ignored_of(body, ChatRequest) == ["stream_options.a", *inside]
    assert ignored_of({**COMPLETION, "response_format": {**AS_SCHEMA, "a": 1}}) == ["response_format.a"]
    assert ignored_of({**COMPLETION, "metadata": {"a": "b"}, "json_schema": {"a": "b"}, "echo": True}) == []
    assert ignored_of({**CHAT, "prompt": "a", "suffix": "b"}, ChatRequest) == ["prompt", "suffix"]


def test_of_many_ignored_fields_the_first_few_are_named_and_cut() -> None:
    ignored = ignored_of({**COMPLETION, **{f"f{number}" + "x" * 5000: 1 for number in range(10_000)}})
    assert [name.rstrip("x") for name in ignored] == [f"f{number}" for number in range(16)]
    assert max(map(len, ignored)) == 100


def test_ignored_fields_are_named_in_a_header_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    front_end = FrontEnd()
    odd = {**CHAT["messages"][0], "a, b\r\nset-cookie: c\u00e9": 1}
    quoted = "messages[0].a%2C%20b%0D%0Aset-cookie%3A%20c%C3%A9"
    for body, route, status, named in (
        ({**COMPLETION, "temprature": 1, "best_off": 2}, COMPLETIONS, 200, "temprature, best_off"),
        ({**COMPLETION, "temprature": 1, "stream": True}, "", 200, "temprature"),
        ({"messages": [odd], "stream": True}, CHATS, 200, quoted),
        ({**COMPLETION, "user": "u"}, COMPLETIONS, 200, None),
        ({**COMPLETION, "\ud800": "u"}, COMPLETIONS, 400, None),
    ):
        request = front_end.answered({**body, "max_tokens": 2}, route)
        assert (front_end.status[request], front_end.headers[request].get("x-specserve-ignored")) == (status, named)
    warnings = [record.message for record in caplog.records if "which is ignored" in record.message]
    assert len(warnings) == 3
    assert warnings[0] == "specserve: requests have the field 'temprature', which is ignored"
    assert "messages[].a%2C" in warnings[2]


def test_the_log_warns_of_a_limited_number_of_names(caplog: pytest.LogCaptureFixture) -> None:
    front_end = FrontEnd()
    for number in range(20):
        front_end.ask({**COMPLETION, "max_tokens": 0, **{f"field{number}x{part}": 1 for part in range(16)}})
    assert sum("which is ignored" in record.message for record in caplog.records) == 100
