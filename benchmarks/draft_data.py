"""Lets the target write answers that a draft model is trained on (train_draft.py), as many as a server can.

A line of the file is an answer: the tokens of its prompt, its own, and at each of these the target's four most likely
tokens with their probabilities. Beside three of ten answers there is a piece of a Python package's source or
description, which is certain. A run that was interrupted is continued. The prompts are made of training.yaml.

    .venv/bin/python benchmarks/draft_data.py FILE [--tokens N] [--config FILE] [--clients N]
"""

import json
import math
import random
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import requests
import yaml

from common import PROMPTS, argument_parser
from servers import REQUEST_TIMEOUT_SECONDS, server_stack, start_specserve
from specserve.api.chat_template import chat_template_of
from specserve.cli.archive import prepared_handler
from specserve.engine.llama_model import LlamaModel

_PORT = 8290
_MOST_TOKENS = 320
# Two thirds of the answers are greedy; a quarter of the prompts contain an earlier answer, up to so many characters.
_TEMPERATURES, _FOLLOWUPS, _QUOTED = (0.0, 0.0, 0.7), 0.25, (500, 900, 1500, 2400)
_TOP = 4
# Tokens of a piece of text, those at its beginning that nothing is learned from, and pieces for each answer.
_PIECE, _CONTEXT, _PIECES = 350, 16, 0.3


class Prompts:
    """Endless prompts, other ones for another seed; few come twice."""

    def __init__(self, seed: int) -> None:
        document = yaml.safe_load((PROMPTS / "training.yaml").read_text(encoding="utf-8"))
        self._parts, self._templates = document["parts"], document["templates"]
        self._followups = document["followups"]
        self._random = random.Random(seed)
        self.answers: list[str] = []

    def make(self) -> tuple[str, float]:
        """A prompt, and the temperature of its answer."""
        choose = self._random.choice
        temperature = choose(_TEMPERATURES)
        if self.answers and self._random.random() < _FOLLOWUPS:
            return choose(self._followups).format(answer=choose(self.answers)[: choose(_QUOTED)]), temperature
        prompt = choose(self._templates)
        for name, parts in self._parts.items():
            while f"{{{name}}}" in prompt:
                prompt = prompt.replace(f"{{{name}}}", choose(parts), 1)
        return prompt, temperature


def main() -> None:
    parser = argument_parser(__doc__, quick="2,000 tokens")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="that the file shall have (%(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time (%(default)s)")
    options = parser.parse_args()
    wanted = 2_000 if options.quick else options.tokens
    config = prepared_handler(options.config)
    if config.target.path is None:
        raise SystemExit(f"{options.config} names no file of a target.")
    model = LlamaModel(config.target.path)
    template = chat_template_of(model)
    if template is None:
        raise SystemExit(f"{config.target.path} has no chat template.")
    tokens = {model.name(token): token for token in reversed(range(model.size))}
    end = tokens[model.eos_text().encode()]
    written = options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else []
    total = sum(len(answer["answer"]) for answer in map(json.loads, written) if len(answer["top"][0]) == _TOP)
    prompts, pieces, lock = Prompts(seed=len(written)), random.Random(len(written)), Lock()
    with server_stack() as stack, options.file.open("a", encoding="utf-8") as file:
        endpoint = start_specserve(stack, options.config, _PORT)
        began, before = time.monotonic(), total

        def ask() -> None:
            nonlocal total
            while total < wanted:
                with lock:
                    text, temperature = prompts.make()
                messages = [{"role": "user", "content": text}]
                body: dict[str, Any] = {"model": config.model_id, "messages": messages, "max_tokens": _MOST_TOKENS}
                body |= {"temperature": temperature, "logprobs": True, "top_logprobs": _TOP} | endpoint.extra
                url = f"{endpoint.url}/v1/chat/completions"
                response = requests.post(url, json=body, timeout=REQUEST_TIMEOUT_SECONDS)
                response.raise_for_status()
                choice = response.json()["choices"][0]
                line = line_of(choice, tokens)
                if choice["finish_reason"] == "stop":
                    append(line, end)
                line["prompt"] = model.encode(template.render(messages), special=True)
                with lock:
                    prompts.answers.append(choice["message"]["content"])
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    if pieces.random() < _PIECES:
                        file.write(json.dumps(piece(model, pieces), separators=(",", ":")) + "\n")
                    file.flush()
                    total += len(line["answer"])
                    rate = (total - before) / (time.monotonic() - began)
                    print(f"{total} of {wanted} tokens, {rate:.0f} a second", flush=True)

        with ThreadPoolExecutor(options.clients) as clients:
            for done in [clients.submit(ask) for _ in range(options.clients)]:
                done.result()


@cache
def _sources() -> list[Path]:
    paths = sysconfig.get_paths()
    return sorted([*Path(paths["stdlib"]).glob("*.py"), *Path(paths["purelib"]).glob("*.dist-info/METADATA")])


def piece(model: LlamaModel, generator: random.Random) -> dict[str, list[Any]]:
    """The file's line of a piece of text from the standard library or a package's description."""
    tokens: list[int] = []
    while len(tokens) < _PIECE // 2:
        content = generator.choice(_sources()).read_text(encoding="utf-8", errors="replace")
        start = content.find("\n", generator.randrange(len(content) + 1)) + 1
        tokens = model.encode(content[start : start + 4 * _PIECE], begin=False)[:_PIECE]
    answer = tokens[_CONTEXT:]
    top = [[token] for token in answer]
    return {"prompt": tokens[:_CONTEXT], "answer": answer, "top": top, "p": [[1.0]] * len(answer)}


def line_of(choice: dict[str, Any], tokens: dict[bytes, int]) -> dict[str, list[Any]]:
    """What the file says of an answer, but for its prompt; `tokens` has their numbers by their bytes."""
    entries = choice["logprobs"]["content"]
    return {
        "answer": [tokens[bytes(entry["bytes"])] for entry in entries],
        "top": [[tokens[bytes(other["bytes"])] for other in entry["top_logprobs"]] for entry in entries],
        "p": [[round(math.exp(other["logprob"]), 4) for other in entry["top_logprobs"]] for entry in entries],
    }


def append(line: dict[str, list[Any]], end: int) -> None:
    """Add the token that ended the answer, which the server does not show."""
    line["answer"].append(end)
    line["top"].append([end] * _TOP)
    line["p"].append([1.0, *[0.0] * (_TOP - 1)])


if __name__ == "__main__":
    main()
