"""Whole responses and events are OpenAI's objects, by the models of its own client; the document lists the routes."""

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model

from front_end import CHATS, COMPLETIONS, FrontEnd, body_of, check

PREDICTION = {"type": "content", "content": "hey"}
SOURCES = {"n": 2, "speculation": {"sources": True}}


def test_responses_and_events_are_openais_objects() -> None:
    front_end = FrontEnd()
    fields: dict[str, Any]
    for fields in ({}, SOURCES, {"stop": "e", "prediction": PREDICTION}, {"logit_bias": {"199": 100}}):
        for scored in (False, True):
            completion = body_of(COMPLETIONS, max_tokens=8, logprobs=2 if scored else None, **fields)
            chat = body_of(CHATS, max_tokens=8, logprobs=scored, top_logprobs=2 if scored else None, **fields)
            stream = front_end.post({**chat, "stream": True, "stream_options": {"include_usage": True}}, CHATS)
            for body, route, kind in ((completion, COMPLETIONS, Completion), (chat, CHATS, ChatCompletion)):
                answer = front_end.ask(body, route)
                check(kind, answer)
                assert [*answer] == ["id", "object", "created", "model", "choices", "usage", "speculation"]
                more = ["sources"] if "speculation" in fields else []
                assert [*answer["choices"][0]][2:] == ["logprobs", "finish_reason", *more]
            for event in front_end.events(stream):
                check(ChatCompletionChunk, event)


def test_every_route_of_the_openapi_document_is_served_and_listed_by_a_404() -> None:
    front_end = FrontEnd()
    document = front_end.ask(None, "v1/openapi.json")
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
