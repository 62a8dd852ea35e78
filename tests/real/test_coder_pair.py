"""The real Qwen2.5-Coder pair of the default configuration, served by TorchServe: text, infill, tools and memory."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from server import Server, running, worker
from specserve.cli.models import prepare
from specserve.cli.paths import DEFAULT_CONFIG
from specserve.config import load_yaml

pytestmark = pytest.mark.real

PROMPTS = {
    "code": "def add(a, b):\n    return",
    "chat": "<|im_start|>user\nWrite a Python function is_prime(n).<|im_end|>\n<|im_start|>assistant\n",
    "json": 'A JSON object with the keys name, age and city:\n{"name": "',
    "prose": "The lighthouse keeper had not spoken to anyone for",
}

# Bytes of the two caches of the default configuration: 32,768 tokens of the target, 2,048 of each of 8 sequences of the
# draft model; keys and values of 2 bytes, 28 layers of 256 numbers in the 1.5B, 24 layers of 128 in the 0.5B; and two
# scales a layer.
CACHE_BYTES = 2 * (32768 * 28 * 2 * (256 + 4) + 8 * 2048 * 24 * 2 * (128 + 4))
# What else the worker has in memory: Python and its libraries, the graphs' buffers, rows of logits: 270 MB and 327 MB
# on two machines. A second copy of the weights, a cache of 32 bits, or a file that stays mapped is over a gigabyte.
OTHER_BYTES = 400 * 2**20


@pytest.fixture(scope="module")
def coder() -> Iterator[Server]:
    with running(config=DEFAULT_CONFIG) as server:
        # Whether drafts pay depends on the machine; the greeting reports either.
        assert "of them accepted" in server.greeting or "nothing was drafted" in server.greeting
        yield server


def complete(server: Server, prompt: str, max_tokens: int = 48, **speculation: Any) -> Any:
    """A greedy completion."""
    return server.client().completions.create(
        model="qwen2.5-coder-1.5b-instruct",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"speculation": speculation} if speculation else None,
    )


def test_generated_code_parses_and_completes_an_expression(coder: Server) -> None:
    prompt = "def fibonacci(n):\n"
    text = complete(coder, prompt, max_tokens=120).choices[0].text
    code = prompt + text.split("\n\n")[0]
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert complete(coder, PROMPTS["code"], max_tokens=4).choices[0].text.startswith(" a + b")


def test_greedy_output_is_the_same_with_and_without_speculation(coder: Server) -> None:
    """Exactly the same: with our kernels a row's logits do not depend on the number of rows in a pass."""
    for family, prompt in PROMPTS.items():
        plain, adaptive, speculative = (complete(coder, prompt, mode=mode) for mode in ("off", "auto", "fixed"))
        assert speculative.choices[0].text == adaptive.choices[0].text == plain.choices[0].text, family
        statistics = speculative.model_extra["speculation"]
        assert statistics["accepted_tokens"] > 0, family
        assert statistics["rounds"] < plain.model_extra["speculation"]["rounds"], family


def test_an_empty_suffix_is_fill_in_the_middle_at_the_end_of_a_file(coder: Server) -> None:
    """Its three control tokens are in the prompt, and the answer ends before another one."""
    fields: Any = {"model": "qwen2.5-coder-1.5b-instruct", "prompt": "def add(a, b):\n    return", "temperature": 0}
    stop = ["<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"]
    plain, infill = (
        coder.client().completions.create(**fields, max_tokens=16, suffix=suffix, stop=stop) for suffix in (None, "")
    )
    assert infill.usage.prompt_tokens == plain.usage.prompt_tokens + 3
    assert infill.choices[0].text.startswith(" a + b")


def test_worker_memory_is_the_model_files_the_kv_caches_and_little_else(coder: Server) -> None:
    prepared = prepare(DEFAULT_CONFIG)
    _, handler = load_yaml(DEFAULT_CONFIG)
    assert (handler.sequences, handler.context_length, handler.cache_tokens) == (8, 32768, 32768)
    assert prepared.draft is not None
    files = prepared.target.stat().st_size + prepared.draft.stat().st_size
    assert worker(coder.state).memory_info().rss <= files + CACHE_BYTES + OTHER_BYTES


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "description": "Tells the time."}}
BY_NAME: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}


@pytest.mark.parametrize(("choice", "temperature"), [("required", 0), (BY_NAME, 0.8), ("auto", 0)])
def test_a_tool_is_called_whole_and_streamed(coder: Server, choice: Any, temperature: float) -> None:
    fields: Any = {
        "model": "qwen2.5-coder-1.5b-instruct",
        "messages": [QUESTION],
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 200,
    }
    client = coder.client()
    [whole] = client.chat.completions.create(**fields).choices
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None or choice == "auto"
    [call] = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"].startswith("Rome")
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    [call_of_stream] = streamed.message.tool_calls or []
    assert call_of_stream.function.arguments == call.function.arguments


def test_the_answer_to_a_call_is_read_and_text_follows(coder: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny, 31 degrees"},
    ]
    fields: Any = {"tools": [WEATHER], "tool_choice": "none", "temperature": 0, "max_tokens": 60}
    client = coder.client()
    [choice] = client.chat.completions.create(model="qwen2.5-coder-1.5b-instruct", messages=messages, **fields).choices
    assert choice.message.tool_calls is None
    assert "31" in (choice.message.content or "")


def test_calls_are_the_same_with_and_without_speculation(coder: Server) -> None:
    def call(mode: str) -> Any:
        response = coder.client().chat.completions.create(
            model="qwen2.5-coder-1.5b-instruct",
            messages=[QUESTION],
            tools=[WEATHER, CLOCK],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            extra_body={"speculation": {"mode": mode}},
        )
        [found] = response.choices[0].message.tool_calls or []
        assert found.type == "function"
        return found.function, response

    (plain, before), (drafted, after) = call("off"), call("fixed")
    assert plain == drafted
    assert after.model_extra["speculation"]["rounds"] < before.model_extra["speculation"]["rounds"] / 2


def test_responses_and_messages_call_the_tool_that_chats_call(coder: Server) -> None:
    """In one conversation: the call, and the text that follows on its answer."""
    client: Any = coder.client()
    model = "qwen2.5-coder-1.5b-instruct"
    function = WEATHER["function"]
    chat = client.chat.completions.create(
        model=model, messages=[QUESTION], tools=[WEATHER], tool_choice="required", temperature=0
    )
    [call] = chat.choices[0].message.tool_calls or []
    assert call.type == "function"

    options: Any = {"model": model, "tools": [{"type": "function", **function}], "temperature": 0}
    items: list[Any] = [QUESTION]
    with client.responses.stream(**options, input=items, tool_choice="required") as stream:
        for _ in stream:
            pass
        [item] = stream.get_final_response().output
    assert item.type == "function_call"
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    answer = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny, 31 degrees"}
    follows = client.responses.create(**options, input=[*items, item.to_dict(), answer], tool_choice="none")

    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    body = {"messages": [QUESTION], "tools": [tool], "max_tokens": 200, "temperature": 0}
    message = coder.post({**body, "tool_choice": {"type": "any"}}, route="/v1/messages").json()
    [use] = message["content"]
    assert message["stop_reason"] == "tool_use"
    assert (use["name"], use["input"]) == (call.function.name, json.loads(call.function.arguments))
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny, 31 degrees"}
    conversation = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    [text] = coder.post(
        {**body, "messages": conversation, "tool_choice": {"type": "none"}}, route="/v1/messages"
    ).json()["content"]
    assert "31" in text["text"]
    assert text["text"] == follows.output_text


# As llama.cpp's plug-ins for editors ask.
OTHER_FILE = {"filename": "shapes.py", "text": "def area_of_rectangle(width, height):\n    return width * height\n"}
GAP: dict[str, Any] = {
    "input_prefix": "from shapes import area_of_rectangle\n\n\ndef area_of_square(side):\n",
    "input_suffix": "\n\n\nprint(area_of_square(3))\n",
    "input_extra": [OTHER_FILE],
    "prompt": "    return area_of_",
    "n_predict": 32,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "samplers": ["top_k", "top_p", "infill"],
    "t_max_predict_ms": 5000,
}


def test_the_gap_is_filled_by_what_another_file_says(coder: Server) -> None:
    warm = {"input_prefix": "", "input_suffix": "", "input_extra": [OTHER_FILE], "n_predict": 0}
    assert coder.post({**warm, "response_fields": [""]}, route="/infill").json() == {}
    answer = coder.post(GAP, route="/infill").json()
    assert answer["content"].strip() == "rectangle(side, side)"
    assert answer["stop_type"] == "eos"
    # The other file was prefilled before.
    assert answer["timings"]["cache_n"] > 20
    off = coder.post({**GAP, "speculation": {"mode": "off"}}, route="/infill").json()
    assert off["content"] == answer["content"]


def test_a_line_that_is_indented_too_little_ends_the_text(coder: Server) -> None:
    fields = {"prompt": "", "input_suffix": "", "n_predict": 120, "ignore_eos": True}
    free = coder.post({**GAP, **fields, "n_indent": 0}, route="/infill").json()["content"]
    kept = coder.post({**GAP, **fields, "n_indent": 4}, route="/infill").json()["content"]
    assert free.startswith(kept)
    lines = kept.split("\n")[1:]
    assert all(line.startswith("    ") for line in lines[:-1])
    assert not lines[-1].strip()
