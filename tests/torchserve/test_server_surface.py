"""The fields of OpenAI's completions and chats, sent by OpenAI's client, while speculating."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
import requests
from pydantic import BaseModel, Field

from server import Server, until
from streams import ended_sequences, sequences

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}
INVALID_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": {"type": "tree"}}}
SCHEMA_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def complete(server: Server, **changes: Any) -> Any:
    """A completion through OpenAI's client."""
    return server.client().completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 16, **changes})


def chat(server: Server, **changes: Any) -> Any:
    """A chat through OpenAI's client."""
    return server.client().chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 400, **changes}
    )


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def accepted(answer: Any) -> int:
    """The number of accepted draft tokens."""
    return int(answer.model_extra["speculation"]["accepted_tokens"])


def test_logprobs_are_the_same_with_and_without_speculation(server: Server) -> None:
    plain, speculative = (
        complete(server, temperature=0, logprobs=3, extra_body={"speculation": {"mode": mode}})
        for mode in ("off", "auto")
    )
    assert accepted(speculative) > 0
    assert speculative.choices[0].text == plain.choices[0].text
    logprobs = [answer.choices[0].logprobs.token_logprobs for answer in (speculative, plain)]
    assert logprobs[0] == logprobs[1]


def test_json_follows_its_schema_while_speculating(server: Server) -> None:
    for temperature in (0, 1):
        answer = chat(server, response_format=SCHEMA_FORMAT, temperature=temperature)
        assert answer.choices[0].finish_reason == "stop"
        thing = json.loads(answer.choices[0].message.content)
        assert set(thing) == {"name", "colour", "sizes"}
        assert thing["colour"] in {"red", "green"}
        assert all(0 <= size <= 99 for size in thing["sizes"])
        assert accepted(answer) > 0


def test_parse_returns_a_union_with_a_discriminator(server: Server) -> None:
    for temperature in (0, 1):
        answer = server.client().chat.completions.parse(
            model="tiny", messages=MESSAGES, max_tokens=400, temperature=temperature, response_format=Owner
        )
        owner = answer.choices[0].message.parsed
        assert owner is not None
        assert isinstance(owner.pet, Cat | Dog)


def test_a_client_that_stops_reading_text_at_the_finish_reason_has_the_whole_text(server: Server) -> None:
    """The request of issue 41: its answer mostly comes in one round, which also ends it."""
    one_city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    one_city_format: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": one_city}}
    body: Any = {"temperature": 0, "response_format": one_city_format}
    whole = chat(server, **body).choices[0]
    *chunks, end, totals = chat(server, **body, stream=True, stream_options={"include_usage": True})
    assert (chunks[0].choices[0].delta.role, totals.choices) == ("assistant", [])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.message.content
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}
    assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "stop")
    for choices in (complete(server, n=3, seed=1, stream=True), complete(server, max_tokens=1, stream=True)):
        ends = [chunk.choices[0] for chunk in choices if chunk.choices[0].finish_reason]
        assert [choice.text for choice in ends] == [""] * len(ends)


def test_an_invalid_field_is_a_400_that_names_it(server: Server) -> None:
    for field, value in (("grammar", "root ::= ("), ("response_format", INVALID_SCHEMA)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, extra_body={field: value})
        assert caught.value.param == field


def test_an_unknown_field_is_ignored_and_named_in_a_header(server: Server) -> None:
    message = {"role": "user", "content": "Hello", "a\r\nset-cookie: b": 1}
    for stream in (False, True):
        body = {"messages": [message], "max_tokens": 4, "stream": stream, "temprature": 0}
        answer = server.post(body, route="/v1/chat/completions")
        assert answer.status_code == 200
        assert answer.headers["x-specserve-ignored"] == "temprature, messages[0].a%0D%0Aset-cookie%3A%20b"
        assert "set-cookie" not in answer.headers
        known = server.post({"prompt": PROMPT, "max_tokens": 4, "stream": stream, "user": "u", "service_tier": "auto"})
        assert "x-specserve-ignored" not in known.headers


def test_fields_of_vllm_and_llama_cpp_have_their_effect(server: Server) -> None:
    def text(**fields: Any) -> Any:
        return complete(server, extra_body={"temperature": 0, **fields}).choices[0].text

    assert text(structured_outputs={"regex": "^(yes|no)!{2}$"}) in {"yes!!", "no!!"}
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 2}
    assert json.loads(text(json_schema=schema, n_predict=40)) in ([], [1], [1, 1])
    first = text(max_tokens=1)
    assert text(stop=[first]) == ""
    assert text(stop=[first], include_stop_str_in_output=True).endswith(first)
    long = complete(server, max_tokens=40, extra_body={"min_tokens": 40, "stop": [first], "temperature": 1.5})
    assert long.usage.completion_tokens == 40


def test_an_editors_plug_in_gets_what_fills_the_gap(server: Server) -> None:
    body = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    ret", "n_predict": 12, "top_k": 40}
    warm = server.post({**body, "n_predict": 0, "response_fields": [""]}, route="/infill")
    assert (warm.status_code, warm.json()) == (200, {})
    answer = server.post(body, route="/infill").json()
    assert answer["tokens_predicted"] <= 12
    assert answer["timings"]["cache_n"] == answer["tokens_evaluated"] - 1
    stream = server.post({**body, "stream": True}, route="/infill")
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == answer["content"]


def test_a_response_of_four_megabytes_is_received(server: Server) -> None:
    """Nearly as large as our limit; TorchServe ends a worker whose response exceeds its own limit."""
    answer = chat(server, n=12, max_tokens=400, logprobs=True, top_logprobs=20, extra_body={"ignore_eos": True})
    assert len(answer.model_dump_json()) > 4_000_000


def test_a_grammar_that_is_too_costly_is_an_error_and_affects_no_other(server: Server) -> None:
    """A 400, or on a busy machine, where it takes over two seconds to find out, an error object under 200."""
    hard = 'root ::= (.{1,900} | [^a]{1,900} | ([^b] .{5,900}){1,90}) "z" .{900}'
    with ThreadPoolExecutor(1) as pool:
        concurrent = pool.submit(complete, server, max_tokens=300, extra_body={"ignore_eos": True})
        refused = server.post({"prompt": PROMPT, "max_tokens": 400, "seed": 1, "grammar": hard})
        assert refused.status_code in {200, 400}
        assert "grammar cannot be followed further" in refused.json()["error"]["message"]
        assert concurrent.result().usage.completion_tokens == 300


def test_a_disconnect_from_a_whole_response_with_a_grammar_cancels_it(server: Server) -> None:
    """After two seconds its status is sent: TorchServe then notices disconnects, and stops sending the request body."""
    before = ended_sequences(server, "cancelled")
    body = {"prompt": PROMPT, "max_tokens": 480, "n": 64, "grammar": "root ::= [a-z ]{900}", "seed": 1}
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {server.key}"}, timeout=0.5
        )
    # TorchServe calls an idle worker only with the next request, which `sequences` sends.
    until(lambda: sequences(server) == (0, 0), "an idle server")
    until(lambda: ended_sequences(server, "cancelled") > before, "sequences that were cancelled")


def test_responses_are_streamed_and_parsed_by_openais_client(server: Server) -> None:
    responses = server.client().responses
    options: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 400, "text_format": Owner}
    parsed = responses.parse(**options, temperature=0)
    assert isinstance(parsed.output_parsed, Owner)
    with responses.stream(**options, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == parsed.output_text
    assert final.output_parsed == parsed.output_parsed
    assert accepted(final) > 0
    with pytest.raises(openai.BadRequestError) as refusal:
        responses.create(model="tiny", input="Hello", previous_response_id=parsed.id)
    assert refusal.value.code == "previous_response_not_found"
