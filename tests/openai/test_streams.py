"""Streams have the shape of OpenAI's: the chunk with `finish_reason` has no text, which comes in chunks before it."""

from typing import Any

import pytest

from front_end import ASCII_ONLY, CHATS, COMPLETIONS, FrontEnd, body_of, events_of, text_of

ROUTES = [COMPLETIONS, CHATS]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


def whole(front_end: FrontEnd, route: str, **fields: Any) -> list[Any]:
    choices: list[Any] = front_end.ask(body_of(route, **GREEDY | fields), route)["choices"]
    return choices


def streamed(front_end: FrontEnd, route: str, **fields: Any) -> list[list[Any]]:
    """The chunks of each choice of a greedy answer."""
    stream = front_end.answered(body_of(route, **GREEDY | fields, stream=True), route)
    chunks = [choice for event in front_end.events(stream) for choice in event["choices"]]
    return [[c for c in chunks if c["index"] == index] for index in sorted({c["index"] for c in chunks})]


@pytest.mark.parametrize("route", ROUTES)
def test_the_chunk_with_the_finish_reason_is_the_last_of_its_choice_and_empty(front_end: FrontEnd, route: str) -> None:
    # What makes a whole block of text come with the end of the answer.
    for fields in (
        {"max_tokens": 1},
        {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}},
        {"logit_bias": {**ASCII_ONLY, "199": 4}, "max_tokens": 60, "temperature": 1, "seed": 3},
        {"logit_bias": {"199": 100}},
        {"response_format": {"type": "json_object"}},
        {"n": 6, "seed": 1, "temperature": 1, "stream_options": {"include_usage": True}},
        {"speculation": {"sources": True}},
    ):
        answers = whole(front_end, route, **fields | {"stream_options": None})
        assert len(answers) == fields.get("n", 1)
        for answer, (*chunks, end) in zip(answers, streamed(front_end, route, **fields), strict=True):
            assert "".join(map(text_of, chunks)) == text_of(answer)
            assert {chunk["finish_reason"] for chunk in chunks} <= {None}
            assert (end["finish_reason"], end["logprobs"]) == (answer["finish_reason"], None)
            assert end["delta"] == {} if route == CHATS else end["text"] == ""
            assert end.get("sources", []) == []
            # A chunk without text would say nothing, but for the first of a chat, which has the role.
            assert all(map(text_of, chunks[1:] if route == CHATS else chunks))


@pytest.mark.parametrize("route", ROUTES)
def test_text_and_log_probabilities_end_before_the_finish_reason(front_end: FrontEnd, route: str) -> None:
    fields = {"logit_bias": ASCII_ONLY, "speculation": {"mode": "fixed", "gamma": 7}, "max_tokens": 30}
    fields |= {"logprobs": True if route == CHATS else 1}
    [answer] = whole(front_end, route, **fields)
    text, key = text_of(answer), "content" if route == CHATS else "token_logprobs"
    for stop in (None, text[9:12]):
        [[*chunks, end]] = streamed(front_end, route, **fields, stop=stop)
        kept = text[: text.index(stop)] if stop else text
        assert "".join(map(text_of, chunks)) == kept
        assert (text_of(end), end["logprobs"]) == ("", None)
        assert end["finish_reason"] == ("stop" if stop else answer["finish_reason"])
        scores = [score for chunk in chunks for score in chunk["logprobs"][key]]
        assert scores == answer["logprobs"][key][: len(kept)]
        [stopped] = whole(front_end, route, **fields, stop=stop)
        assert (text_of(stopped), stopped["logprobs"][key]) == (kept, scores)


def test_an_echoed_prompt_comes_before_the_chunk_with_the_finish_reason(front_end: FrontEnd) -> None:
    [[chunk, end]] = streamed(front_end, COMPLETIONS, echo=True, logprobs=1, max_tokens=0)
    assert (chunk["text"], chunk["finish_reason"], len(chunk["logprobs"]["tokens"])) == ("hello", None, 5)
    assert end == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_an_empty_chat_answer_has_a_chunk_with_the_role_and_one_with_the_finish_reason(front_end: FrontEnd) -> None:
    [[begin, end]] = streamed(front_end, CHATS, logit_bias={"199": 100})
    assert (begin["delta"], begin["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
    assert (end["delta"], end["finish_reason"]) == ({}, "stop")


def test_a_stream_that_fails_has_no_chunk_with_a_finish_reason() -> None:
    for route in ROUTES:
        *chunks, error = events_of(FrontEnd().failed_stream(body_of(route, **GREEDY), route))
        assert error["error"]["type"] == "server_error"
        assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
