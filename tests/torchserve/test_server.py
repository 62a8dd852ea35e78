"""End to end: TorchServe, the built archive, the tiny pair, and OpenAI's client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests

from server import PATIENCE_SECONDS, Server, until
from streams import ended_sequences, sequences

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"


def complete(server: Server, **changes: Any) -> Any:
    """A greedy completion through OpenAI's client."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **changes}
    return server.client().completions.create(**body)


def stream_text(server: Server, **changes: Any) -> str:
    """The text of a stream."""
    return "".join(chunk.choices[0].text for chunk in complete(server, stream=True, **changes))


def test_a_completion_has_usage_and_speculation_statistics(server: Server) -> None:
    answer = complete(server)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    statistics = answer.model_extra["speculation"]
    assert statistics["mode"] == "fixed", "the default mode of the tiny pair's configuration"
    assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"]
    assert statistics["rounds"] < 24


def test_speculation_does_not_change_greedy_output(server: Server) -> None:
    plain = complete(server, extra_body={"speculation": {"mode": "off"}})
    assert plain.model_extra["speculation"]["drafted_tokens"] == 0
    for gamma in (1, 2, 5, 15):
        options = {"speculation": {"mode": "fixed", "gamma": gamma}}
        assert complete(server, extra_body=options).choices[0].text == plain.choices[0].text


def test_a_stream_has_the_text_of_the_whole_response(server: Server) -> None:
    assert stream_text(server) == complete(server).choices[0].text


def test_include_usage_adds_the_usage_at_the_end_of_a_stream(server: Server) -> None:
    *chunks, last = complete(server, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.model_extra["speculation"]["rounds"] > 0
    assert all(chunk.usage is None for chunk in chunks)


def test_every_chunk_of_a_stream_has_whole_characters(server: Server) -> None:
    """Tiny models often split a character over several tokens; no chunk may contain a part of one."""
    for seed in range(5):
        texts = [
            chunk.choices[0].text
            for chunk in complete(server, stream=True, temperature=1.5, seed=seed, max_tokens=200, prompt="世界 🙂 é")
        ]
        assert "".join(texts).count("\ufffd") <= 1 + sum("\ufffd" in text for text in texts[-1:])


def test_output_ends_before_a_stop_string(server: Server) -> None:
    text = complete(server).choices[0].text
    stop = text[8:11]
    answer = complete(server, stop=[stop, "never said"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert stream_text(server, stop=stop) == text[: text.index(stop)]


def test_a_seed_repeats_its_output_and_requests_without_one_differ(server: Server) -> None:
    texts = {complete(server, temperature=1, seed=5).choices[0].text for _ in range(3)}
    assert len(texts) == 1
    assert len({complete(server, temperature=1).choices[0].text for _ in range(3)}) > 1


def test_a_prompt_of_token_ids_and_echo(server: Server) -> None:
    answer = complete(server, prompt=[5, 6, 7], echo=True)
    assert answer.usage.prompt_tokens == 3
    assert complete(server, echo=True).choices[0].text.startswith(PROMPT)


def test_a_chat_stream_has_the_text_of_the_whole_response(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat: Any = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = server.client().chat.completions.create(**chat)
    assert whole.choices[0].message.role == "assistant"
    chunks = server.client().chat.completions.create(**chat, stream=True)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == whole.choices[0].message.content


def test_models_are_listed_and_retrieved(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["tiny", "qwen"]
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4")


def test_the_model_url_without_a_route_serves_completions(server: Server) -> None:
    for path in ("/predictions/qwen", "/predictions/qwen/1.0"):
        answer = requests.post(
            f"http://127.0.0.1:{server.port}{path}",
            json={"prompt": PROMPT, "max_tokens": 3},
            headers={"Authorization": f"Bearer {server.key}"},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.json()["object"] == "text_completion"


def test_eight_concurrent_requests_have_the_output_of_each_alone(server: Server) -> None:
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


def test_invalid_requests_are_openais_errors_and_affect_no_other(server: Server) -> None:
    def stream_valid() -> str:
        return stream_text(server, max_tokens=200)

    with ThreadPoolExecutor(1) as pool:
        expected = stream_valid()
        concurrent = pool.submit(stream_valid)
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, extra_body={"top_k": "many"})
        assert caught.value.param == "top_k"
        with pytest.raises(openai.NotFoundError) as missing:
            complete(server, model="gpt-4")
        assert missing.value.code == "model_not_found"
        assert concurrent.result() == expected


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


def test_an_unknown_route_is_a_404(server: Server) -> None:
    answer = server.post({"prompt": "a"}, route="/v1/edits")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_a_wrong_key_is_torchserves_400(server: Server) -> None:
    headers = {"Authorization": "Bearer wrong"}
    answer = requests.post(server.url, json={}, headers=headers, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 400
    assert answer.json()["type"] == "InvalidKeyException"


def test_a_disconnect_cancels_the_requests_sequences(server: Server) -> None:
    """`post` returns when the status is sent, which for a whole response is after two seconds."""
    for stream in (True, False):
        before = ended_sequences(server, "cancelled")
        body = {"prompt": PROMPT, "n": 100, "max_tokens": 480, "ignore_eos": True, "stream": stream}
        server.post(body, stream=True).close()
        # TorchServe calls an idle worker only with the next request, which `sequences` sends.
        until(lambda: sequences(server) == (0, 0), "an idle server")
        until(lambda: ended_sequences(server, "cancelled") > before, "sequences that were cancelled")  # noqa: B023


def test_the_worker_logged_no_handler_error_and_was_not_restarted(server: Server) -> None:
    """The last test of this file: nothing above raised in the handler or restarted the worker."""
    log = server.log()
    assert "specserve: request " not in log
    assert "Invoking custom service failed" not in log
    assert log.count("specserve: a pass of one token takes") == 1
