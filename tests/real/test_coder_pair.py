"""The real Qwen2.5-Coder pair of the default configuration, served by TorchServe: text, infill, tools and memory."""

import ast
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server import Server, running, worker
from specserve.cli.paths import DEFAULT_CONFIG
from specserve.weights.models import prepare

pytestmark = pytest.mark.real

MODEL = "qwen2.5-coder-1.5b-instruct"
PROMPTS = {
    "code": "def add(a, b):\n    return",
    "chat": "<|im_start|>user\nWrite a Python function is_prime(n).<|im_end|>\n<|im_start|>assistant\n",
    "json": 'A JSON object with the keys name, age and city:\n{"name": "',
    "prose": "The lighthouse keeper had not spoken to anyone for",
}
MIB = 2**20
# What else the worker has in memory: Python and its libraries, the graphs' buffers, rows of logits: 270 to 340 MB on
# three machines. A second copy of the weights, a cache of 32 bits, or a file that stays mapped is over a gigabyte.
REST = 400 * MIB


@pytest.fixture(scope="module")
def coder() -> Iterator[Server]:
    with running(config=DEFAULT_CONFIG) as server:
        # Whether drafts pay depends on the machine; the greeting reports either.
        assert "tokens a round" in server.greeting
        yield server


def test_a_worker_takes_its_weights_the_caches_that_it_announces_and_little_else(coder: Server) -> None:
    """The most that it ever had in memory; later tests leave prefixes in host memory."""
    weights = sum(path.stat().st_size for path in prepare(DEFAULT_CONFIG).values())
    [said] = re.findall(r"the KV cache of (\d+) tokens takes (\d+) MiB, other caches (\d+) MiB", coder.log())
    # Keys and values of 2 bytes, 28 layers of 256 numbers in the target and 24 layers of 128 in the draft model, which
    # keeps 2,048 tokens of each of 8 sequences; and 3 % more for scales.
    caches = [2 * 32768 * 28 * 2 * (256 + 8), 2 * 8 * 2048 * 24 * 2 * (128 + 4)]
    assert [int(text) for text in said] == [32768, *(round(size / MIB) for size in caches)]

    def ask(number: int) -> int:
        prompt = [100 + (number * n) % 40_000 for n in range(50 * (1 + number))]
        answer = coder.post({"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "logprobs": 5})
        return int(answer.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, range(1, 5))) == [20] * 4
    status = Path(f"/proc/{worker(coder.state).pid}/status").read_text()
    [peak] = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    rest = 1024 * int(peak) - weights - sum(caches)
    assert rest <= REST, f"{rest / MIB:.0f} MiB"


def complete(server: Server, prompt: str, max_tokens: int = 32, **speculation: Any) -> Any:
    extra = {"speculation": speculation} if speculation else None
    body: Any = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return server.client().completions.create(**body, extra_body=extra)


def test_generated_code_parses_and_completes_an_expression(coder: Server) -> None:
    prompt = "def fibonacci(n):\n"
    text = complete(coder, prompt, max_tokens=120).choices[0].text
    assert isinstance(ast.parse(prompt + text.split("\n\n")[0]).body[0], ast.FunctionDef)
    assert complete(coder, PROMPTS["code"], max_tokens=4).choices[0].text.startswith(" a + b")


def test_greedy_output_is_the_same_with_and_without_speculation(coder: Server) -> None:
    """Exactly the same: with our kernels a row's logits do not depend on the number of rows in a pass."""
    for family, prompt in PROMPTS.items():
        plain, adaptive, speculative = (complete(coder, prompt, mode=mode) for mode in ("off", "auto", "fixed"))
        assert speculative.choices[0].text == adaptive.choices[0].text == plain.choices[0].text, family
        statistics = speculative.model_extra["speculation"]
        assert statistics["accepted_tokens"] > 0, family
        assert statistics["rounds"] < plain.model_extra["speculation"]["rounds"], family


PARAMETERS: Any = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED: Any = {"name": "get_weather", "description": "Tells the weather of a city."}
WEATHER: Any = {"type": "function", "function": {**NAMED, "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "description": "Tells the time."}}
BY_NAME: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}


def call_of(message: Any) -> str:
    """The arguments of the call that a message has, checked by the tool's schema."""
    [call] = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"].startswith("Rome")
    jsonschema.validate(arguments, PARAMETERS)
    return str(call.function.arguments)


def test_a_tool_is_called_whole_without_speculation_and_streamed_with_it(coder: Server) -> None:
    fields: Any = {"model": MODEL, "messages": [QUESTION], "tools": [WEATHER, CLOCK], "tool_choice": BY_NAME}
    fields |= {"temperature": 0.8, "seed": 7, "max_tokens": 200}
    client = coder.client()
    plain = client.chat.completions.create(**fields, extra_body={"speculation": {"mode": "off"}})
    with client.chat.completions.stream(**fields, extra_body={"speculation": {"mode": "fixed"}}) as stream:
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == plain.choices[0].finish_reason == "tool_calls"
    assert call_of(streamed.message) == call_of(plain.choices[0].message)


def test_chats_responses_and_messages_call_the_same_tool_and_use_its_result_alike(coder: Server) -> None:
    client: Any = coder.client()
    result = "sunny, 31 degrees"

    chat: Any = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    first = client.chat.completions.create(**chat, messages=[QUESTION], tool_choice="auto").choices[0].message
    arguments = call_of(first)
    turns = [QUESTION, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": result}]
    chat |= {"messages": turns, "tool_choice": "none", "max_tokens": 60}
    follows = client.chat.completions.create(**chat).choices[0].message
    assert follows.tool_calls is None
    assert "31" in follows.content

    options: Any = {"model": MODEL, "tools": [{"type": "function", **WEATHER["function"]}], "temperature": 0}
    with client.responses.stream(**options, input=[QUESTION], tool_choice="required") as stream:
        [item] = stream.get_final_response().output
    assert item.type == "function_call"
    assert (item.name, item.arguments) == ("get_weather", arguments)
    answer = {"type": "function_call_output", "call_id": item.call_id, "output": result}
    turns = [QUESTION, item.to_dict(), answer]
    assert client.responses.create(**options, input=turns, tool_choice="none").output_text == follows.content

    tools = [{**NAMED, "input_schema": PARAMETERS}]
    body = {"messages": [QUESTION], "tools": tools, "max_tokens": 200, "temperature": 0}
    message = coder.post({**body, "tool_choice": {"type": "any"}}, route="/v1/messages").json()
    [use] = message["content"]
    assert message["stop_reason"] == "tool_use"
    assert (use["name"], use["input"]) == ("get_weather", json.loads(arguments))
    content = [{"type": "tool_result", "tool_use_id": use["id"], "content": result}]
    turns = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
    last = coder.post({**body, "messages": turns, "tool_choice": {"type": "none"}}, route="/v1/messages").json()
    assert [block["text"] for block in last["content"]] == [follows.content]


# As llama.cpp's plug-ins for editors ask.
OTHER_FILE = {"filename": "shapes.py", "text": "def area_of_rectangle(width, height):\n    return width * height\n"}
LIMITS = {"n_predict": 32, "n_indent": 4, "top_k": 40, "top_p": 0.99, "t_max_predict_ms": 5000}
GAP: dict[str, Any] = {
    "input_prefix": "from shapes import area_of_rectangle\n\n\ndef area_of_square(side):\n",
    "input_suffix": "\n\n\nprint(area_of_square(3))\n",
    "input_extra": [OTHER_FILE],
    "prompt": "    return area_of_",
    "samplers": ["top_k", "top_p", "infill"],
    **LIMITS,
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
