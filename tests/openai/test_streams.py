"""Streams have the shape of OpenAI's: the chunk with `finish_reason` has no text, which comes in chunks before it."""

from __future__ import annotations

from typing import Any

import pytest

from front_end import FrontEnd

ROUTES = ["v1/completions", "v1/chat/completions"]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
# Tokens are bytes, and these are not ASCII; token 199 is the end token.
ASCII_ONLY = {str(token): -100 for token in range(128, 199)}
# What makes a whole block of text come with the end of the answer.
ENDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}},
    {"logit_bias": {**ASCII_ONLY, "199": 4}, "max_tokens": 60, "temperature": 1, "seed": 3},
    {"logit_bias": {"199": 100}},
    {"response_format": {"type": "json_object"}},
    {"n": 3, "seed": 1, "temperature": 1},
    {"speculation": {"sources": True}},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True, "max_tokens": 100},
]


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    """A greedy request to one of the routes."""
    question = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in route else {"prompt": "hello"}
    return {**GREEDY, **question, **fields}


def text_of(choice: Any) -> str:
    """The text of a choice, whole or a chunk of it."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content", ""))


def chunks_by_choice(events: list[Any]) -> dict[int, list[Any]]:
    """A stream's choices, by index."""
    choices = [choice for event in events for choice in event["choices"]]
    return {index: [c for c in choices if c["index"] == index] for index in sorted({c["index"] for c in choices})}


@pytest.mark.parametrize("route", ROUTES)
def test_the_chunk_with_the_finish_reason_is_the_last_of_its_choice_and_empty(route: str) -> None:
    for fields in ENDS:
        check_end(FrontEnd(), route, fields)


def check_end(front_end: FrontEnd, route: str, fields: dict[str, Any]) -> None:
    """Compare a stream with the whole response."""
    whole = front_end.post(body_of(route, **{**fields, "stream_options": None}), route)
    stream = front_end.post(body_of(route, **fields, stream=True), route)
    front_end.run()
    streamed = chunks_by_choice(front_end.events(stream))
    answers = front_end.answer(whole)["choices"]
    assert len(streamed) == len(answers) == fields.get("n", 1)
    for answer in answers:
        *chunks, end = streamed[answer["index"]]
        assert "".join(map(text_of, chunks)) == text_of(answer)
        assert {chunk["finish_reason"] for chunk in chunks} <= {None}
        assert end["finish_reason"] == answer["finish_reason"]
        assert end["logprobs"] is None
        assert end["delta"] == {} if "chat" in route else end["text"] == ""
        assert end.get("sources", []) == []
        # A chunk without text would say nothing, but for the first of a chat, which has the role.
        assert all(map(text_of, chunks[1:] if "chat" in route else chunks))


@pytest.mark.parametrize("route", ROUTES)
def test_text_and_log_probabilities_end_before_the_chunk_with_the_finish_reason(
    front_end: FrontEnd, route: str
) -> None:
    fields = {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}, "max_tokens": 30}
    fields |= {"logprobs": True if "chat" in route else 1}
    plain = front_end.post(body_of(route, **fields), route)
    front_end.run()
    [answer] = front_end.answer(plain)["choices"]
    text, key = text_of(answer), "content" if "chat" in route else "token_logprobs"
    for stop in (None, text[9:12]):
        stream = front_end.post(body_of(route, **fields, stop=stop, stream=True), route)
        front_end.run()
        [[*chunks, end]] = chunks_by_choice(front_end.events(stream)).values()
        kept = text[: text.index(stop)] if stop else text
        assert "".join(map(text_of, chunks)) == kept
        assert (text_of(end), end["logprobs"]) == ("", None)
        assert end["finish_reason"] == ("stop" if stop else answer["finish_reason"])
        scores = [score for chunk in chunks for score in chunk["logprobs"][key]]
        assert scores == answer["logprobs"][key][: len(kept)]


def test_an_echoed_prompt_comes_before_the_chunk_with_the_finish_reason(front_end: FrontEnd) -> None:
    echo = {"echo": True, "logprobs": 1, "max_tokens": 0}
    stream = front_end.post(body_of(ROUTES[0], **echo, stream=True))
    front_end.run()
    [[chunk, end]] = chunks_by_choice(front_end.events(stream)).values()
    assert (chunk["text"], chunk["finish_reason"], len(chunk["logprobs"]["tokens"])) == ("hello", None, 5)
    assert end == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_an_empty_chat_answer_has_a_chunk_with_the_role_and_one_with_the_finish_reason(front_end: FrontEnd) -> None:
    stream = front_end.post(body_of(ROUTES[1], logit_bias={"199": 100}, stream=True), ROUTES[1])
    front_end.run()
    begin, end = (event["choices"][0] for event in front_end.events(stream))
    assert (begin["delta"], begin["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
    assert (end["delta"], end["finish_reason"]) == ({}, "stop")


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_fails_has_no_chunk_with_a_finish_reason(front_end: FrontEnd, route: str) -> None:
    stream = front_end.post(body_of(route, stream=True, max_tokens=100, ignore_eos=True), route)
    while not any(front_end.chunks[stream]):
        front_end.handle_once()
    front_end.target.fail_after = 0
    front_end.run()
    *chunks, error = front_end.events(stream)
    assert error["error"]["type"] == "server_error"
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
