"""Several choices in one response, log-probabilities, and scored prompts, through the handler."""

from __future__ import annotations

from typing import Any

import pytest

from front_end import SLOTS, FrontEnd

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0.8, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 3}
CHAT_ROUTE = "v1/chat/completions"


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


def answer_to(front_end: FrontEnd, body: dict[str, Any], route: str = "v1/completions") -> Any:
    """The whole response to a body."""
    request_id = front_end.post(body, route)
    front_end.run()
    return front_end.answer(request_id)


def texts(answer: Any) -> list[str]:
    """The texts of an answer's choices."""
    return [choice["text"] for choice in answer["choices"]]


def test_n_gives_n_different_choices_and_counts_the_prompt_once(front_end: FrontEnd) -> None:
    answer = answer_to(front_end, {**BODY, "n": 6})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len(set(texts(answer))) == 6
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] > 40
    alone = answer_to(front_end, BODY)
    assert texts(alone) == texts(answer)[:1]


def test_several_prompts_are_answered_in_order_and_as_if_each_were_alone(front_end: FrontEnd) -> None:
    answer = answer_to(front_end, {**BODY, "prompt": ["abc", "xyz"], "n": 2, "echo": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [text[:3] for text in texts(answer)] == ["abc", "abc", "xyz", "xyz"]
    assert answer["usage"]["prompt_tokens"] == 6
    assert texts(answer_to(front_end, {**BODY, "prompt": [[97, 98, 99]], "n": 2, "echo": True})) == texts(answer)[:2]


def test_text_offsets_point_at_the_tokens_of_prompt_and_output(front_end: FrontEnd) -> None:
    choice = answer_to(front_end, {**BODY, "echo": True, "logprobs": 2})["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert logprobs["tokens"][:5] == list("hello")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # The fake vocabulary's single bytes above 127 are not valid UTF-8 and become U+FFFD.
        assert text.startswith(token if len(token) == 1 else "\ufffd", offset)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    scores = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in list(scores)[1:]:
        assert top[token] == logprob < 0
        assert 2 <= len(top) <= 3


def test_text_offsets_of_a_token_id_prompt_count_replacement_characters(front_end: FrontEnd) -> None:
    ids = [104, 56, 195, 105, 106]
    choice = answer_to(front_end, {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0})["choices"][0]
    assert choice["text"] == "h8\ufffdij"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 4]


def test_max_tokens_0_only_scores_the_prompt(front_end: FrontEnd) -> None:
    scored = answer_to(front_end, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1})
    longer = answer_to(front_end, {"prompt": "hello", "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0})
    assert texts(scored) == ["hello"]
    assert scored["usage"]["completion_tokens"] == 0
    for name, values in scored["choices"][0]["logprobs"].items():
        assert values == longer["choices"][0]["logprobs"][name][:5]


def test_a_prompt_of_one_token_has_no_logprob(front_end: FrontEnd) -> None:
    [choice] = answer_to(front_end, {"prompt": "h", "max_tokens": 0, "echo": True, "logprobs": 1})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]


def test_logprobs_0_returns_only_the_output_tokens_logprobs(front_end: FrontEnd) -> None:
    [choice] = answer_to(front_end, {**BODY, "logprobs": 0})["choices"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 12


def test_logprobs_end_where_a_stop_string_ends_the_output(front_end: FrontEnd) -> None:
    unstopped = answer_to(front_end, {**BODY, "logprobs": 0})["choices"][0]
    stop = unstopped["text"][4:6]
    stopped = answer_to(front_end, {**BODY, "logprobs": 0, "stop": stop})["choices"][0]
    assert stopped["text"] == unstopped["text"][: unstopped["text"].index(stop)]
    assert stopped["logprobs"]["text_offset"] == list(range(len(stopped["text"])))


def test_chat_logprobs_have_bytes_and_alternatives(front_end: FrontEnd) -> None:
    answer = answer_to(front_end, {**CHAT, "logprobs": True, "top_logprobs": 4}, CHAT_ROUTE)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    written = bytes(byte for token in content for byte in token["bytes"])
    assert written.decode(errors="replace") == choice["message"]["content"]
    for token in content:
        tops = [other["logprob"] for other in token["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 4
        assert token["logprob"] <= tops[0]


def test_prediction_tokens_are_counted_on_both_routes(front_end: FrontEnd) -> None:
    for body, route in ((BODY, "v1/completions"), (CHAT, CHAT_ROUTE)):
        greedy = {**body, "temperature": 0, "logit_bias": {str(byte): -100 for byte in range(128, 199)}}
        whole = answer_to(front_end, greedy, route)["choices"][0]
        text = whole["message"]["content"] if route == CHAT_ROUTE else whole["text"]
        answer = answer_to(front_end, {**greedy, "prediction": {"type": "content", "content": text}}, route)
        assert answer["choices"][0].get("text", text) == text
        details = answer["usage"]["completion_tokens_details"]
        tally = answer["speculation"]["drafters"]["prediction"]
        assert details["accepted_prediction_tokens"] == tally["accepted"] > 0
        assert details["rejected_prediction_tokens"] == tally["drafted"] - tally["accepted"]


def test_a_failed_choice_is_one_error_and_frees_all_slots(front_end: FrontEnd) -> None:
    whole = front_end.post({**BODY, "n": SLOTS - 1})
    stream = front_end.post({**BODY, "n": 2, "stream": True})
    front_end.handle_once()
    front_end.target.fail_after = 0
    front_end.run()
    assert (front_end.status[whole], front_end.status[stream]) == (500, 500)
    assert front_end.sequences() == (0, 0)


def test_a_disconnect_ends_all_choices_of_the_request(front_end: FrontEnd) -> None:
    cancelled = front_end.post({**BODY, "n": 12, "stream": True, "max_tokens": 100})
    front_end.handle_once()
    front_end.disconnect(cancelled)
    front_end.handle_once()
    assert front_end.sequences() == (0, 0)


@pytest.mark.parametrize(("call", "calls_before"), [("truncate", 0), ("forward", 1)])
def test_an_exception_before_or_in_a_round_is_a_500_for_its_requests_only(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, call: str, calls_before: int
) -> None:
    """`truncate` is called before a sequence's first round, `forward` in every round."""
    failing = front_end.post({**BODY, "max_tokens": 50})
    for _ in range(calls_before):
        front_end.handle_once()
    with monkeypatch.context() as patch:
        patch.setattr(front_end.target, call, lambda *_: 1 / 0)
        front_end.run()
    assert front_end.status[failing] == 500
    assert texts(answer_to(front_end, BODY))


def test_the_first_event_of_each_choice_waits_for_all_scores_of_its_prompt(front_end: FrontEnd) -> None:
    """A choice that reuses a cached prefix is ahead of the one that scores the prompt, which reuses nothing."""
    prompt = "a prompt that takes several chunks to be read " * 4
    answer_to(front_end, {"prompt": prompt, "max_tokens": 1})
    body = {**BODY, "prompt": prompt, "echo": True, "logprobs": 1, "n": 3, "stream": True}
    stream = front_end.post(body)
    front_end.run()
    first: dict[int, Any] = {}
    for event in front_end.events(stream):
        [choice] = event["choices"]
        first.setdefault(choice["index"], choice["logprobs"])
    assert len(first) == 3
    assert all(logprobs["tokens"][: len(prompt)] == [*prompt] for logprobs in first.values())
    assert all(None not in logprobs["token_logprobs"][1:] for logprobs in first.values())
