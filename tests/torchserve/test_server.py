"""The real thing: TorchServe, the built archive, the tiny pair, OpenAI's own client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests

from server import Server, until
from streams import ended, sequences

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"


def complete(server: Server, **changes: Any) -> Any:
    """A greedy completion through OpenAI's client."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **changes}
    return server.client().completions.create(**body)


def stream_text(server: Server, **changes: Any) -> str:
    """The text of a stream."""
    return "".join(chunk.choices[0].text for chunk in complete(server, stream=True, **changes))


def test_a_completion_says_how_it_was_decoded(server: Server) -> None:
    answer = complete(server)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    account = answer.model_extra["speculation"]
    assert account["mode"] == "fixed", "which the tiny pair's configuration makes of a request that says nothing"
    assert 0 < account["accepted_tokens"] < account["drafted_tokens"]
    assert account["rounds"] < 24


def test_speculation_does_not_change_greedy_text(server: Server) -> None:
    plain = complete(server, extra_body={"speculation": {"mode": "off"}})
    assert plain.model_extra["speculation"]["drafted_tokens"] == 0
    for gamma in (1, 2, 5, 16):
        options = {"speculation": {"mode": "fixed", "gamma": gamma}}
        assert complete(server, extra_body=options).choices[0].text == plain.choices[0].text


def test_a_stream_says_the_same_text_as_one_answer(server: Server) -> None:
    assert stream_text(server) == complete(server).choices[0].text


def test_a_stream_ends_with_usage_where_it_was_asked_for(server: Server) -> None:
    *chunks, last = complete(server, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.model_extra["speculation"]["rounds"] > 0
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_is_utf8_in_every_chunk(server: Server) -> None:
    """Tiny models often spell a character in several tokens; no chunk may carry half of one."""
    for seed in range(5):
        texts = [
            chunk.choices[0].text
            for chunk in complete(server, stream=True, temperature=1.5, seed=seed, max_tokens=200, prompt="世界 🙂 é")
        ]
        assert "".join(texts).count("\ufffd") <= 1 + sum("\ufffd" in text for text in texts[-1:])


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    text = complete(server).choices[0].text
    stop = text[8:11]
    answer = complete(server, stop=[stop, "never said"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert stream_text(server, stop=stop) == text[: text.index(stop)]


def test_the_same_seed_gives_the_same_text(server: Server) -> None:
    texts = {complete(server, temperature=1, seed=5).choices[0].text for _ in range(3)}
    assert len(texts) == 1
    assert len({complete(server, temperature=1).choices[0].text for _ in range(3)}) > 1


def test_a_prompt_of_token_ids_and_echo(server: Server) -> None:
    answer = complete(server, prompt=[5, 6, 7], echo=True)
    assert answer.usage.prompt_tokens == 3
    assert complete(server, echo=True).choices[0].text.startswith(PROMPT)


def test_a_chat_whole_and_streamed(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat: Any = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = server.client().chat.completions.create(**chat)
    assert whole.choices[0].message.role == "assistant"
    chunks = server.client().chat.completions.create(**chat, stream=True)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == whole.choices[0].message.content


def test_models_are_listed(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["tiny", "qwen"]
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4")


@pytest.mark.parametrize("path", ["/predictions/qwen", "/predictions/qwen/1.0"])
def test_the_bare_model_takes_completions(server: Server, path: str) -> None:
    answer = requests.post(
        f"http://127.0.0.1:{server.port}{path}",
        json={"prompt": PROMPT, "max_tokens": 3},
        headers={"Authorization": f"Bearer {server.key}"},
        timeout=60,
    )
    assert answer.json()["object"] == "text_completion"


def test_eight_at_once_streams_and_whole_answers_mixed_say_what_each_says_alone(server: Server) -> None:
    prompts = [f"{PROMPT} number {n}" for n in range(8)]
    alone = [complete(server, prompt=prompt, max_tokens=16).choices[0].text for prompt in prompts]

    def ask(n: int) -> str:
        if n % 2:
            return stream_text(server, prompt=prompts[n], max_tokens=16)
        return str(complete(server, prompt=prompts[n], max_tokens=16).choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone


def test_more_requests_than_slots_wait_and_are_answered(server: Server) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda n: complete(server, max_tokens=40, seed=n, temperature=1), range(24)))
    assert all(answer.choices[0].finish_reason for answer in answers)


def test_bad_requests_are_openais_errors_and_touch_nobody_else(server: Server) -> None:
    def good() -> str:
        return stream_text(server, max_tokens=200)

    with ThreadPoolExecutor(1) as pool:
        expected = good()
        beside = pool.submit(good)
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, extra_body={"nonsense": 1})
        assert caught.value.param == "nonsense"
        with pytest.raises(openai.NotFoundError) as missing:
            complete(server, model="gpt-4")
        assert missing.value.code == "model_not_found"
        assert beside.result() == expected


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"", "application/json"),
        (b"null", "application/json"),
        (b'"text"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"hello", "text/plain"),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b'{"prompt": NaN}', "application/json"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "application/json"),
        (b"[" * 5000, "application/json"),
    ],
)
def test_a_body_that_is_no_request_is_a_400_with_openais_error(
    server: Server, content: bytes, content_type: str
) -> None:
    answer = server.post(data=content, headers={"Content-Type": content_type})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_json_body_is_taken_under_any_content_type(server: Server) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3})
    for content_type in ("text/plain", "application/octet-stream"):
        answer = server.post(data=body, headers={"Content-Type": content_type})
        assert answer.json()["object"] == "text_completion"


def test_an_unknown_route_is_a_404(server: Server) -> None:
    answer = server.post({"prompt": "a"}, route="/v1/edits")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_a_wrong_token_is_torchserves_own_400(server: Server) -> None:
    answer = requests.post(server.url, json={}, headers={"Authorization": "Bearer wrong"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["type"] == "InvalidKeyException"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_sequences(server: Server, *, stream: bool) -> None:
    """The call returns with the status, which for a whole answer is settled after two seconds."""
    before = ended(server, "cancelled")
    many = {"prompt": PROMPT, "n": 100, "max_tokens": 480, "ignore_eos": True, "stream": stream}
    server.post(many, stream=True).close()
    # TorchServe calls the worker again with the next request only.
    until(lambda: sequences(server) == (0, 0), "an idle server")
    until(lambda: ended(server, "cancelled") > before, "sequences that were cancelled")


def test_the_worker_never_stumbled(server: Server) -> None:
    """The last test of this file: nothing above raised in the handler or restarted the worker."""
    log = server.log()
    assert "could not be parsed" not in log
    assert "Invoking custom service failed" not in log
    assert log.count("specserve: a decode step takes") == 1
