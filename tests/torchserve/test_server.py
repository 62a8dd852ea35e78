"""End to end: TorchServe, the built archive, the tiny pair, and OpenAI's client."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
import requests
from pydantic import BaseModel, Field

from server import PATIENCE_SECONDS, Server, until
from streams import PROMPT, sequences

pytestmark = pytest.mark.server

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def complete(server: Server, **changes: Any) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **changes}
    return server.client().completions.create(**body)


def stream_text(server: Server, **changes: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in complete(server, stream=True, **changes))


def test_speculation_is_counted_and_does_not_change_greedy_output(server: Server) -> None:
    fields: Any = {"max_tokens": 60, "logprobs": 3}
    plain = complete(server, **fields, extra_body={"speculation": {"mode": "off"}})
    assert (plain.model_extra["speculation"]["drafted_tokens"], plain.usage.completion_tokens) == (0, 60)
    # By default the tiny pair drafts a fixed number; lookups alone may be right every time.
    answer = complete(server, **fields, extra_body={"speculation": {"drafter": "model"}})
    assert answer.choices == plain.choices
    statistics = answer.model_extra["speculation"]
    assert statistics["mode"] == "fixed"
    assert 0.2 < statistics["accepted_tokens"] / statistics["drafted_tokens"] < 1, "the tiny draft resembles its target"
    assert statistics["rounds"] < 60


def test_a_stream_has_the_text_of_the_whole_response_and_a_seed_repeats_it(server: Server) -> None:
    fields: Any = {"prompt": "héllo 世界 🙂", "seed": 4, "temperature": 1, "max_tokens": 80}
    whole = complete(server, **fields, logprobs=0).choices[0]
    assert stream_text(server, **fields) == whole.text
    assert "bytes:" in "".join(whole.logprobs.tokens), "a character is split between tokens"
    assert len({complete(server, temperature=1).choices[0].text for _ in range(3)}) > 1


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


def test_what_torchserve_passes_on_is_read_as_json_or_refused(server: Server) -> None:
    """With any content type but that of a form, whose fields TorchServe reads: the error says how to send it."""
    as_json, form = "application/json", "application/x-www-form-urlencoded"
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3})
    for kind in ("text/plain", "application/octet-stream", "text/json; charset=utf-8", "", None):
        answer = server.post(data=body, headers={"Content-Type": kind})
        assert answer.json()["object"] == "text_completion", kind
    assert server.post(data={"body": body}).json()["usage"]["completion_tokens"] == 3
    invalid = [(content, as_json) for content in (b"{", b"[]", b"", b'"text"', b"\xff\xfe", b"[" * 5000)]
    invalid += [(b'{"prompt": "a", "max_tokens": 1e400}', as_json), (b"hello", "text/plain"), (b"a=b", form)]
    for content, kind in [*invalid, (body.encode(), form)]:
        answer = server.post(data=content, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), content
    assert "--json instead of -d" in answer.json()["error"]["message"]


def test_the_model_url_without_a_route_serves_completions_and_a_wrong_key_is_torchserves_400(server: Server) -> None:
    for url in (server.url, server.url.removesuffix("/1.0")):
        body, headers = {"prompt": PROMPT, "max_tokens": 3}, server.authorization()
        answer = requests.post(url, json=body, headers=headers, timeout=PATIENCE_SECONDS)
        assert answer.json()["object"] == "text_completion"
    answer = server.post({}, headers={"Authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException")


def test_a_disconnect_cancels_the_requests_sequences(server: Server) -> None:
    """`post` returns when the status is sent, which for a whole response is after two seconds.

    TorchServe then notices disconnects, and stops sending the request body.
    """
    cancelled = "texts_total", 'reason="cancelled"'
    for changes in ({"stream": True}, {}, {"grammar": "root ::= [a-z ]{900}", "ignore_eos": False}):
        before = server.metric(*cancelled)
        body = {"prompt": PROMPT, "n": 100, "max_tokens": 480, "ignore_eos": True, **changes}
        if "grammar" in changes:
            with pytest.raises(requests.Timeout):
                server.post(body, timeout=0.5)
        else:
            server.post(body, stream=True).close()
        # TorchServe calls an idle worker only with the next request, which `sequences` sends.
        until(lambda: sequences(server) == (0, 0), "an idle server")
        until(lambda: server.metric(*cancelled) > before, "sequences that were cancelled")  # noqa: B023


def test_json_follows_its_class_whole_and_streamed_while_speculating(server: Server) -> None:
    for temperature in (0, 1):
        body = CHAT | {"max_tokens": 400, "temperature": temperature, "response_format": Owner}
        answer: Any = server.client().chat.completions.parse(**body)
        assert isinstance(answer.choices[0].message.parsed, Owner)
        assert answer.model_extra["speculation"]["accepted_tokens"] > 0
    responses = server.client().responses
    options: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 400, "text_format": Owner, "temperature": 0}
    with responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == responses.parse(**options).output_text
    assert isinstance(final.output_parsed, Owner)


def test_a_response_of_four_megabytes_is_received(server: Server) -> None:
    """Nearly as large as our limit; TorchServe ends a worker whose response exceeds its own limit."""
    options: Any = {"n": 12, "max_tokens": 400, "logprobs": True, "top_logprobs": 20, "temperature": 1}
    answer = server.client().chat.completions.create(**CHAT | options, extra_body={"ignore_eos": True})
    assert len(answer.model_dump_json()) > 4_000_000
