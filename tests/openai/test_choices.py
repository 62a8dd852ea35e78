"""Several choices in one response, log-probabilities, and scored prompts, through the handler."""

from typing import Any

import pytest

from front_end import ASCII_ONLY, CHATS, COMPLETIONS, SLOTS, FrontEnd, body_of, text_of

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0.8, "seed": 3}
CHAT = body_of(CHATS, max_tokens=12, seed=3)


@pytest.fixture
def front_end() -> FrontEnd:
    return FrontEnd()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_n_gives_n_different_choices_and_counts_the_prompt_once(front_end: FrontEnd) -> None:
    answer = front_end.ask({**BODY, "n": 6})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len(set(texts(answer))) == 6
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (5, 5 + usage["completion_tokens"])
    assert usage["completion_tokens"] > 40
    assert texts(front_end.ask(BODY)) == texts(answer)[:1]


def test_several_prompts_are_answered_in_order_and_as_if_each_were_alone(front_end: FrontEnd) -> None:
    answer = front_end.ask({**BODY, "prompt": ["abc", "xyz"], "n": 2, "echo": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [text[:3] for text in texts(answer)] == ["abc", "abc", "xyz", "xyz"]
    assert answer["usage"]["prompt_tokens"] == 6
    assert texts(front_end.ask({**BODY, "prompt": [[97, 98, 99]], "n": 2, "echo": True})) == texts(answer)[:2]


def test_text_offsets_point_at_the_tokens_of_prompt_and_output(front_end: FrontEnd) -> None:
    [choice] = front_end.ask({**BODY, "echo": True, "logprobs": 2})["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert logprobs["tokens"][:5] == list("hello")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # The fake vocabulary's single bytes above 127 are not valid UTF-8 and become U+FFFD.
        assert text.startswith(token if len(token) == 1 else "\ufffd", offset)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scores = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in list(scores)[1:]:
        assert top[token] == logprob < 0
        assert 2 <= len(top) <= 3
    [ids] = front_end.ask({"prompt": [104, 56, 195, 105, 106], "echo": True, "logprobs": 0, "max_tokens": 0})["choices"]
    assert (ids["text"], ids["logprobs"]["text_offset"]) == ("h8\ufffdij", [0, 1, 2, 2, 4])
    assert ids["logprobs"]["top_logprobs"] is None


def test_max_tokens_0_only_scores_the_prompt(front_end: FrontEnd) -> None:
    scoring = {"echo": True, "logprobs": 1, "temperature": 0}
    scored, longer = (front_end.ask({"prompt": "hello", "max_tokens": n, **scoring}) for n in (0, 3))
    one = front_end.ask({"prompt": "h", "max_tokens": 0, **scoring})
    assert (texts(scored), scored["usage"]["completion_tokens"]) == (["hello"], 0)
    for name, values in scored["choices"][0]["logprobs"].items():
        assert values == longer["choices"][0]["logprobs"][name][:5]
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [None]


def test_chat_logprobs_have_bytes_and_alternatives(front_end: FrontEnd) -> None:
    [choice] = front_end.ask({**CHAT, "logprobs": True, "top_logprobs": 4}, CHATS)["choices"]
    content = choice["logprobs"]["content"]
    written = bytes(byte for token in content for byte in token["bytes"])
    assert written.decode(errors="replace") == choice["message"]["content"]
    for token in content:
        tops = [other["logprob"] for other in token["top_logprobs"]]
        assert (tops, len(tops)) == (sorted(tops, reverse=True), 4)
        assert token["logprob"] <= tops[0]


def test_prediction_tokens_are_counted_on_both_routes(front_end: FrontEnd) -> None:
    for body, route in ((BODY, COMPLETIONS), (CHAT, CHATS)):
        greedy = {**body, "temperature": 0, "logit_bias": ASCII_ONLY}
        [whole] = front_end.ask(greedy, route)["choices"]
        prediction = {"type": "content", "content": text_of(whole)}
        answer = front_end.ask({**greedy, "prediction": prediction}, route)
        assert text_of(answer["choices"][0]) == text_of(whole)
        details = answer["usage"]["completion_tokens_details"]
        tally = answer["speculation"]["drafters"]["prediction"]
        assert details["accepted_prediction_tokens"] == tally["accepted"] > 0
        assert details["rejected_prediction_tokens"] == tally["drafted"] - tally["accepted"]


def test_a_failed_choice_is_one_error_and_frees_all_slots(front_end: FrontEnd) -> None:
    whole = front_end.post({**BODY, "n": SLOTS - 1})
    stream = front_end.begin({**BODY, "n": 2, "stream": True})
    front_end.target.fail_after = 0
    front_end.run()
    assert (front_end.status[whole], front_end.status[stream]) == (500, 500)
    assert front_end.sequences() == (0, 0)


def test_the_first_event_of_each_choice_waits_for_all_scores_of_its_prompt(front_end: FrontEnd) -> None:
    """A choice that reuses a cached prefix is ahead of the one that scores the prompt, which reuses nothing."""
    prompt = "a prompt that takes several chunks to be read " * 4
    front_end.ask({"prompt": prompt, "max_tokens": 1})
    stream = front_end.answered({**BODY, "prompt": prompt, "echo": True, "logprobs": 1, "n": 3, "stream": True})
    first: dict[int, Any] = {}
    for event in front_end.events(stream):
        [choice] = event["choices"]
        first.setdefault(choice["index"], choice["logprobs"])
    assert len(first) == 3
    assert all(logprobs["tokens"][: len(prompt)] == [*prompt] for logprobs in first.values())
    assert all(None not in logprobs["token_logprobs"][1:] for logprobs in first.values())
