"""Are tool calls always valid, the same with and without speculation, and how much faster are they written?

Every task of prompts/tools.yaml is asked with a required call, with `auto` and by name, whole and streamed, greedily
and at temperature 0.8, with adaptive speculation and with none. A call is valid if its name is a tool's that was sent,
and its arguments parse and follow that one's schema.

    .venv/bin/python benchmarks/tools.py [--config FILE] [--requests 400] [--port P] [--quick]
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, product
from statistics import median
from typing import Any

import jsonschema
import requests
import yaml

from common import PROMPTS, Row, argument_parser, print_result, print_table, served, with_progress
from servers import Endpoint, server_stack, start_specserve

MODES = ("off", "auto")
MAX_TOKENS = 256
_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
BANK: dict[str, Any] = yaml.safe_load((PROMPTS / "tools.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ask:
    """A request that is sent in each mode of speculation."""

    task: str
    choice: str
    temperature: float
    stream: bool
    seed: int
    body: dict[str, Any]


@dataclass
class Answer:
    """What came back."""

    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments by index
    text: str = ""
    reason: str = ""  # why it ended
    tokens: int = 0
    decode: float = 0.0  # seconds

    def add(self, message: dict[str, Any]) -> None:
        """Add a message, or a delta of one."""
        self.text += message.get("content") or ""
        for index, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = call["function"].get("name", ""), call["function"]["arguments"]
            there = self.calls.setdefault(call.get("index", index), ["", ""])
            there[:] = there[0] + name, there[1] + arguments


def tools_of(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a task as a client sends them."""
    names = BANK["tools"] if task["tools"] == "all" else task["tools"]
    return [{"type": "function", "function": {"name": name, **BANK["tools"][name]}} for name in names]


def asks() -> Iterator[Ask]:
    """Requests without end: all tasks by each choice, temperature and way, then with another seed."""
    seed = 0
    while True:
        seed += 1
        for stream, temperature, choice, task in product(
            (False, True), (0.0, 0.8), ("required", "auto", "named"), BANK["tasks"]
        ):
            tools = tools_of(task)
            named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
            body = {
                "messages": [{"role": "user", "content": task["message"]}],
                "tools": tools,
                "tool_choice": named if choice == "named" else choice,
                "parallel_tool_calls": task.get("parallel", False),
                "temperature": temperature,
                "seed": seed,
                "max_tokens": MAX_TOKENS,
                "stream": stream,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            }
            yield Ask(task["name"], choice, temperature, stream, seed, body)


def send(endpoint: Endpoint, ask: Ask, mode: str) -> Answer:
    body = {**ask.body, "speculation": {"mode": mode, "pool": ""}}
    answer = Answer()
    with requests.post(f"{endpoint.url}/v1/chat/completions", json=body, stream=ask.stream, timeout=600) as response:
        if response.status_code != requests.codes.ok:
            raise SystemExit(f"{ask.task}: {response.status_code} {response.text}")
        lines = response.iter_lines() if ask.stream else [response.content]
        for line in lines:
            data = line.removeprefix(b"data: ")
            # A comment is a sign of life.
            if not data or data == b"[DONE]" or data.startswith(b":"):
                continue
            event = json.loads(data)
            for choice in event["choices"]:
                answer.add(choice.get("message") or choice.get("delta"))
                answer.reason = choice["finish_reason"] or answer.reason
            if event.get("speculation"):
                seconds = event["speculation"]["seconds"]
                answer.tokens = event["usage"]["completion_tokens"]
                answer.decode = seconds["draft"] + seconds["target"] + seconds["other"]
    return answer


def faults(ask: Ask, answer: Answer) -> list[str]:
    """What is wrong with the calls of an answer; one that its last allowed token cut may be incomplete."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in ask.body["tools"]}
    found = []
    calls = [answer.calls[index] for index in sorted(answer.calls)]
    for name, arguments in calls[: -1 if answer.reason == "length" else None]:
        try:
            jsonschema.validate(json.loads(arguments), schemas[name], format_checker=_FORMATS)
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            found.append(f"{ask.task}: {name} {arguments}: {error!r:.200}")
    if not calls and ask.choice != "auto" and answer.reason != "length":
        found.append(f"{ask.task}: no call, but {answer.text!r:.200}")
    if len(calls) > 1 and not ask.body["parallel_tool_calls"]:
        found.append(f"{ask.task}: {len(calls)} calls")
    if answer.reason not in {"length", "tool_calls" if calls else "stop"}:
        found.append(f"{ask.task}: ended by {answer.reason!r} after {len(calls)} calls")
    return found


def summarise(choice: str, temperature: float, pairs: list[tuple[Ask, dict[str, Answer]]]) -> Row:
    answers = [answers for _, answers in pairs]
    ratios = [
        (both["auto"].tokens / both["auto"].decode) / (both["off"].tokens / both["off"].decode)
        for both in answers
        if both["auto"].decode and both["off"].decode
    ]
    return {
        "choice": choice,
        "temperature": temperature,
        "requests": len(MODES) * len(pairs),
        "calls": sum(len(answer.calls) for both in answers for answer in both.values()),
        "cut": sum(answer.reason == "length" for both in answers for answer in both.values()),
        "faults": sum(len(faults(ask, answer)) for ask, both in pairs for answer in both.values()),
        "same as plain": sum((b["auto"].calls, b["auto"].text) == (b["off"].calls, b["off"].text) for b in answers),
        "answers": len(pairs),
        "ratio": round(median(ratios), 3) if ratios else None,
    }


def main() -> None:
    parser = argument_parser(__doc__, quick="every 23rd of the requests", port=9080)
    parser.add_argument("--requests", type=int, default=400, help="how many, both modes together (default: 400)")
    options = parser.parse_args()
    chosen = list(islice(asks(), 0, options.requests // len(MODES), 23 if options.quick else 1))
    results: dict[tuple[str, float], list[tuple[Ask, dict[str, Answer]]]] = {}
    notes = []
    with server_stack() as stack:
        endpoint = start_specserve(stack, options.config, options.port)
        for ask in with_progress(chosen, "requests"):
            # Neither mode reads the prompt for the other.
            send(endpoint, replace(ask, body={**ask.body, "max_tokens": 1}), "off")
            both = {mode: send(endpoint, ask, mode) for mode in MODES}
            results.setdefault((ask.choice, ask.temperature), []).append((ask, both))
            notes += [fault for one in both.values() for fault in faults(ask, one)]
    rows = [summarise(*key, pairs) for key, pairs in sorted(results.items())]
    print_table("tool calls, adaptive against plain decoding", rows)
    print_result("tools", served(options.config), rows, notes)


if __name__ == "__main__":
    main()
