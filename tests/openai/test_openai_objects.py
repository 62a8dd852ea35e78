"""Whole responses and events are OpenAI's objects, by the models of its own client; the document lists the routes."""

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model

from front_end import FrontEnd, check
from specserve.api.openapi import openapi

MESSAGES = [{"role": "user", "content": "hello"}]
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "speculation": {"sources": True}},
    {"stop": "e", "prediction": {"type": "content", "content": "hey"}},
    {"logit_bias": {"199": 100}},
]


def test_responses_and_events_are_openais_objects() -> None:
    front_end = FrontEnd()
    for fields in FIELDS:
        for scored in (False, True):
            options = {**fields, "max_tokens": 8}
            completion = {"prompt": "hello", **options, **({"logprobs": 2} if scored else {})}
            chat = {"messages": MESSAGES, **options, **({"logprobs": True, "top_logprobs": 2} if scored else {})}
            stream = {**chat, "stream": True, "stream_options": {"include_usage": True}}
            whole = front_end.post(completion)
            chats = [front_end.post(body, "v1/chat/completions") for body in (chat, stream)]
            front_end.run()
            check(Completion, front_end.text(whole))
            check(ChatCompletion, front_end.text(chats[0]))
            for event in front_end.events(chats[1]):
                check(ChatCompletionChunk, json.dumps(event))
            for request_id in (whole, chats[0]):
                answer = front_end.answer(request_id)
                assert [*answer] == ["id", "object", "created", "model", "choices", "usage", "speculation"]
                more = ["sources"] if "speculation" in fields else []
                assert [*answer["choices"][0]][2:] == ["logprobs", "finish_reason", *more]


def test_every_route_of_the_openapi_document_is_served_and_listed_by_a_404() -> None:
    front_end = FrontEnd()
    document = openapi()
    listed = [path.removeprefix("/") for path in document["paths"]]
    assert len(listed) == 10
    assert sum("requestBody" in operations.get("post", {}) for operations in document["paths"].values()) == 6
    answered = [front_end.post({}, path.format(id="qwen")) for path in listed]
    unknown, models = front_end.post({}, "v1/edits"), front_end.post(None, "v1/models/qwen")
    front_end.run()
    assert {front_end.status[request_id] for request_id in answered} == {200, 400}
    message = front_end.answer(unknown)["error"]["message"]
    assert all(path in message for path in listed if "{" not in path)
    assert Model.model_validate_json(front_end.text(models)).owned_by == "specserve"
    options = document["components"]["schemas"]["SpeculationOptions"]["properties"]
    assert options["gamma"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 32}


def test_what_a_server_runs_is_told_by_v1_speculation() -> None:
    status = FrontEnd().speculation_status()
    assert {"version", "models", "kernels", "costs", "controller", "limits", "sequences", "holdback"} <= {*status}
    assert {*status["costs"]} == {"target", "draft"}
    assert {"rows", "milliseconds_near"} <= {*status["costs"]["target"]}
    assert "variant" in status["kernels"]
