"""End to end: TorchServe, the built archive, tiny pairs of Qwen2 and of Llama, and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from server import PATIENCE_SECONDS, Server, registered, until
from streams import ended_sequences, sequences

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def llama(server: Server, archive: Callable[..., Path]) -> Iterator[Server]:
    """A Llama pair, whose tokeniser is SentencePiece's."""
    archive("llama", "llama")
    with registered(server, "llama") as llama:
        yield llama
        llama.assert_undisturbed()


@pytest.fixture
def pairs(server: Server, llama: Server) -> list[Server]:
    return [server, llama]


def complete(server: Server, **changes: Any) -> Any:
    """A greedy completion through OpenAI's client."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **changes}
    return server.client().completions.create(**body)


def stream_text(server: Server, **changes: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in complete(server, stream=True, **changes))


def test_speculation_is_counted_and_does_not_change_greedy_output(pairs: list[Server]) -> None:
    for server in pairs:
        plain = complete(server, max_tokens=60, extra_body={"speculation": {"mode": "off"}})
        assert plain.model_extra["speculation"]["drafted_tokens"] == 0
        assert plain.usage.completion_tokens == 60
        for gamma in (1, 2, 5, 15):
            # Lookups alone may be right every time.
            options = {"speculation": {"mode": "fixed", "gamma": gamma, "drafter": "model"}}
            answer = complete(server, max_tokens=60, extra_body=options)
            assert answer.choices[0].text == plain.choices[0].text
            statistics = answer.model_extra["speculation"]
            assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"]
            assert statistics["rounds"] < 60
    default = complete(pairs[0]).model_extra["speculation"]
    assert default["mode"] == "fixed", "the default mode of the tiny pair's configuration"


def test_a_stream_has_the_text_of_the_whole_response_and_a_seed_repeats_it(pairs: list[Server]) -> None:
    for server in pairs:
        for prompt in ("héllo 世界 🙂", ""):
            fields: Any = {"prompt": prompt, "seed": 4, "temperature": 1, "max_tokens": 80}
            assert stream_text(server, **fields) == complete(server, **fields).choices[0].text
    assert len({complete(pairs[0], temperature=1).choices[0].text for _ in range(3)}) > 1


def test_a_chat_uses_the_models_template(pairs: list[Server]) -> None:
    templates = ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|user|>\nHi</s>\n<|assistant|>\n")
    for server, rendered in zip(pairs, templates, strict=True):
        completions = server.client().chat.completions
        message = completions.create(**CHAT).choices[0].message
        assert (message.role, message.content) == ("assistant", complete(server, prompt=rendered).choices[0].text)
        chunks = completions.create(**CHAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_include_usage_adds_the_usage_at_the_end_of_a_stream(server: Server) -> None:
    *chunks, last = complete(server, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.model_extra["speculation"]["rounds"] > 0
    assert all(chunk.usage is None for chunk in chunks)


def test_models_are_listed_and_retrieved(server: Server) -> None:
    models = server.client().models
    assert [model.id for model in models.list()] == ["tiny", "qwen"]
    assert models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        models.retrieve("gpt-4")


def test_the_model_url_without_a_route_serves_completions(server: Server) -> None:
    for url in (server.url, server.url.removesuffix("/1.0")):
        headers = {"Authorization": f"Bearer {server.key}"}
        answer = requests.post(url, json={"prompt": PROMPT, "max_tokens": 3}, headers=headers, timeout=PATIENCE_SECONDS)
        assert answer.json()["object"] == "text_completion"


def test_requests_beyond_the_slots_wait_and_all_have_the_output_of_each_alone(server: Server) -> None:
    def ask(n: int) -> str:
        fields: Any = {"prompt": f"{PROMPT} number {n}", "max_tokens": 16}
        return stream_text(server, **fields) if n % 2 else str(complete(server, **fields).choices[0].text)

    alone = [ask(n) for n in range(24)]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, range(24))) == alone


def test_invalid_requests_are_openais_errors_and_affect_no_other(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        expected = stream_text(server, max_tokens=200)
        concurrent = pool.submit(stream_text, server, max_tokens=200)
        for fields, param in (({"temperature": 9}, "temperature"), ({"extra_body": {"top_k": "many"}}, "top_k")):
            with pytest.raises(openai.BadRequestError) as caught:
                complete(server, **fields)
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError) as missing:
            complete(server, model="gpt-4")
        assert missing.value.code == "model_not_found"
        assert concurrent.result() == expected
    answer = server.post({"prompt": "a"}, route="/v1/edits")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_an_invalid_body_is_a_400_with_openais_error(server: Server) -> None:
    for content, content_type in (
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"", "application/json"),
        (b'"text"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"hello", "text/plain"),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b'{"prompt": "a", "max_tokens": 1}', "application/x-www-form-urlencoded"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "application/json"),
        (b"[" * 5000, "application/json"),
    ):
        answer = server.post(data=content, headers={"Content-Type": content_type})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), content


def test_a_json_body_is_accepted_with_any_content_type(server: Server) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3})
    for content_type in ("text/plain", "application/octet-stream", "text/json; charset=utf-8", "", None):
        answer = server.post(data=body, headers={"Content-Type": content_type})
        assert answer.json()["object"] == "text_completion", content_type


def test_the_error_of_json_that_is_announced_as_a_form_says_how_to_send_it(server: Server) -> None:
    """What `curl -d` sends: TorchServe reads the body as a form, and what is not `name=value` does not reach us."""
    body = json.dumps({"prompt": "What is 1+1?", "max_tokens": 3})
    answer = server.post(data=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert "--json instead of -d" in answer.json()["error"]["message"]
    form = server.post(data={"body": body})
    assert form.json()["usage"]["completion_tokens"] == 3


def test_a_wrong_key_is_torchserves_400(server: Server) -> None:
    answer = server.post({}, headers={"Authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException")


def test_a_disconnect_cancels_the_requests_sequences(server: Server) -> None:
    """`post` returns when the status is sent, which for a whole response is after two seconds."""
    for stream in (True, False):
        before = ended_sequences(server, "cancelled")
        body = {"prompt": PROMPT, "n": 100, "max_tokens": 480, "ignore_eos": True, "stream": stream}
        server.post(body, stream=True).close()
        # TorchServe calls an idle worker only with the next request, which `sequences` sends.
        until(lambda: sequences(server) == (0, 0), "an idle server")
        until(lambda: ended_sequences(server, "cancelled") > before, "sequences that were cancelled")  # noqa: B023
