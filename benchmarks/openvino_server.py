"""OpenVINO GenAI's continuous batching pipeline behind OpenAI's completions route: its package has no server.

It streams greedy completions only. A pipeline with a draft model reads no GGUF file (2026.4.1), so OpenVINO GenAI first
writes what it reads from each file in a format of its own, below `--cache`.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import openvino_genai
from openvino_genai import GenerationStatus

RUNNING = GenerationStatus.RUNNING
Tokens = queue.Queue[list[int] | None]
# n-gram of the prompt lookup, as in OpenVINO GenAI's sample; tokens that a draft or a lookup proposes by default.
MAX_NGRAM_SIZE, ASSISTANT_TOKENS = 3, 5


def convert(gguf: Path, cache: Path) -> Path:
    """The directory with a GGUF file in OpenVINO's format, written the first time."""
    directory = cache / gguf.stem
    if not directory.exists():
        unfinished = directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # OpenVINO GenAI writes beside the file that it reads.
        (unfinished / gguf.name).symlink_to(gguf)
        openvino_genai.LLMPipeline(unfinished / gguf.name, "CPU", enable_save_ov_model=True)
        unfinished.rename(directory)
    return directory


class Engine:
    """The pipeline, and a thread that runs its steps while there are requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        threads = {"INFERENCE_NUM_THREADS": options.threads}
        properties: dict[str, Any] = dict(threads)
        if options.draft:
            draft = convert(options.draft, options.cache)
            properties["draft_model"] = openvino_genai.draft_model(draft, "CPU", **threads)
        if options.lookup:
            properties["prompt_lookup"] = True
        model = convert(options.model, options.cache)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, openvino_genai.SchedulerConfig(), "CPU", properties
        )
        self._drafts = options.assistant_tokens if options.draft or options.lookup else 0
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arriving: queue.Queue[tuple[Any, Any, Tokens]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: str, max_tokens: int) -> Tokens:
        """Add a request; returns the queue of its tokens, as steps yield them, with None after the last."""
        config = self._pipeline.get_config()
        config.max_new_tokens, config.do_sample = max_tokens, False
        if self._drafts:
            config.num_assistant_tokens, config.max_ngram_size = self._drafts, MAX_NGRAM_SIZE
        tokens: Tokens = queue.Queue()
        self._arriving.put((self.tokenizer.encode(prompt, add_special_tokens=False).input_ids, config, tokens))
        return tokens

    def _run(self) -> None:
        numbers = count()
        running: list[tuple[Any, Tokens]] = []
        while True:
            while not running or not self._arriving.empty():
                prompt, config, tokens = self._arriving.get()
                running.append((self._pipeline.add_request(next(numbers), prompt, config), tokens))
            self._pipeline.step()
            for handle, tokens in running:
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
                if handle.get_status() != RUNNING:
                    tokens.put(None)
            running = [(handle, tokens) for handle, tokens in running if handle.get_status() == RUNNING]


class Handler(BaseHTTPRequestHandler):
    """Answers `/health` and `/v1/completions`."""

    engine: Engine

    def do_GET(self) -> None:
        """Say that the model is loaded."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """Stream a completion; the last event has its number of tokens."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        received: list[int] = []
        sent = ""
        arriving = self.engine.submit(body["prompt"], body["max_tokens"])
        while (tokens := arriving.get()) is not None:
            received += tokens
            text = self.engine.tokenizer.decode(received)
            # An incomplete character waits for its last byte.
            if not text.endswith("\ufffd"):
                self._send({"choices": [{"text": text[len(sent) :]}]})
                sent = text
        self._send({"choices": [], "usage": {"completion_tokens": len(received)}})

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    """Load, answer a first request, which allocates and compiles, and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--cache", type=Path, required=True, help="directory of converted files")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--draft", type=Path, help="the GGUF file of a draft model")
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup")
    parser.add_argument("--assistant-tokens", type=int, default=ASSISTANT_TOKENS, help="draft tokens of a step")
    options = parser.parse_args()
    Handler.engine = Engine(options)
    first = Handler.engine.submit("1, 2, 3, 4, 5, 6, 7, 8, 9,", 4)
    while first.get() is not None:
        pass
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
