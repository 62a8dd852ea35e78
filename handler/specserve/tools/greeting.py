"""The first completion of a new server, and how to go on from there."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Any

import requests

from specserve.errors import EnvironmentFailure
from specserve.tools import paths
from specserve.tools.cli import say
from specserve.tools.paths import shown
from specserve.tools.state import State
from specserve.tools.wait_ready import session

_PROMPT = "def fibonacci(n):\n"
_TIMEOUT_SECONDS = 300


def base_url(state: State) -> str:
    """Return the base URL for an OpenAI client."""
    return f"http://127.0.0.1:{state.ports.inference}/predictions/{paths.NAME}/{paths.VERSION}/v1"


def greet(state: State) -> None:
    """Have the server complete a line of code; print the text and what speculation did.

    Raises:
        EnvironmentFailure: the server does not answer as it should.
    """
    # Said aloud, so that the greeting is never one of the requests that are held back.
    body = {"prompt": _PROMPT, "max_tokens": 64, "temperature": 0, "speculation": {"mode": "auto"}}
    begun = time.monotonic()
    try:
        answer = session(state.key("inference")).post(
            f"{base_url(state)}/completions", json=body, timeout=_TIMEOUT_SECONDS
        )
    except requests.RequestException as error:
        raise EnvironmentFailure(f"the server is ready but did not answer a completion ({error}).") from error
    seconds = time.monotonic() - begun
    if not answer.ok:
        raise EnvironmentFailure(
            f"the server is ready but answered a completion with {answer.status_code} "
            f"({' '.join(answer.text.split())[:300]}); {shown(state.model_log)} may say more."
        )
    say(summary(answer.json(), seconds))


def summary(completion: dict[str, Any], seconds: float) -> str:
    """Return the text of a completion, and one line of numbers below it."""
    text = completion["choices"][0]["text"]
    tokens = completion["usage"]["completion_tokens"]
    numbers = [f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s"]
    speculation = completion.get("speculation") or {}
    if drafted := speculation.get("drafted_tokens"):
        numbers.append(f"{drafted} drafted, {speculation['accepted_tokens']} of them accepted")
        numbers.append(f"{speculation['mean_acceptance_length']:.2f} tokens a round")
    elif speculation:
        numbers.append("nothing was drafted")
    return f"{_PROMPT}{text.rstrip()}\n\n{', '.join(numbers)}"


def how_to_go_on(state: State, *, with_tokens: bool) -> str:
    """Return the lines that send a request by curl and by OpenAI's client, ready to copy."""
    port = state.ports.inference
    key_file = str(state.key_file)
    read_key = f"import json; print(json.load(open({key_file!r}))['inference']['key'])"
    api_key = f"json.load(open({key_file!r}))['inference']['key']" if with_tokens else '"none"'
    bearer = '-H "Authorization: Bearer $KEY" ' if with_tokens else ""
    lines = [
        *([f'KEY=$({shlex.quote(sys.executable)} -c "{read_key}")'] if with_tokens else []),
        f"curl {base_url(state)}/completions {bearer}\\",
        """  -H 'Content-Type: application/json' -d '{"prompt": "def add(a, b):", "max_tokens": 64}'""",
        "",
        "import json, openai  # pip install openai",
        f'client = openai.OpenAI(base_url="{base_url(state)}",',
        f"                       api_key={api_key})",
        "model = client.models.list().data[0].id",
        'answer = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=64)',
        "print(answer.choices[0].text)",
        "",
    ]
    if with_tokens:
        lines.append(f"keys: {shown(state.key_file)} (new at each start)")
    stop = "scripts/stop" if port == 8080 else f"scripts/stop --port {port}"
    return "\n".join([*lines, f"logs: {shown(state.logs)}    stop it: {stop}"])
