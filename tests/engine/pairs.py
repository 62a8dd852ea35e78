"""A pair of models as a worker loads it, answering requests as clients write them; and tiny pairs to load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig
from specserve.engine import kernels
from specserve.engine.kernels import Mode
from specserve.engine.llama_model import write_pure_q4_0
from specserve.sequence import Sequence
from specserve.serving.generation import Generation
from specserve.serving.loading import load_models
from specserve.serving.openai.parse import to_generations
from specserve.serving.openai.prompt import Tokenizer
from specserve.serving.openai.request_schema import CompletionRequest, parse_body
from specserve.serving.scheduler import Scheduler
from tiny_models import write_tiny

PLAIN = {"mode": "off"}
# llama.cpp's own kernels have to pass the same tests: SPECSERVE_TEST_KERNELS=off scripts/test tests/engine
KERNELS: Mode = "off" if os.environ.get("SPECSERVE_TEST_KERNELS") == "off" else "auto"


def drafting(gamma: int) -> dict[str, Any]:
    """A request's wish for so many drafts a round."""
    return {"mode": "fixed", "gamma": gamma}


class TinyFiles:
    """Tiny models in a directory, each written on first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, architecture: str, role: str) -> Path:
        """The file of one model: Q4_0 throughout, which gives the same logits for any number of rows."""
        file = self._directory / f"{architecture}-{role}.gguf"
        if not file.exists():
            single = self._directory / "single.gguf"
            write_tiny(single, architecture, role)
            assert write_pure_q4_0(single, file)
        return file

    def config(self, target: str, draft: str | None = None, *, context_length: int = 256) -> HandlerConfig:
        """A worker's configuration for a target of one architecture and a draft of the same, or of another."""
        return HandlerConfig(
            model_id="tiny",
            kernels=KERNELS,
            target=ModelConfig(path=self.path(target, "target")),
            draft=ModelConfig(path=self.path(draft or target, "draft")),
            sequences=3,
            context_length=context_length,
            prefill_rows=16,
            threads=1,
            # A draft as slow as its target never pays, and the controller would leave it alone.
            speculation=SpeculationConfig(mode="fixed"),
        )


@dataclass(frozen=True)
class Answered:
    """An answer with the pieces its stream was made of."""

    sequence: Sequence
    chunks: list[str]
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.chunks)


class Pair:
    """Target and draft, loaded."""

    def __init__(self, config: HandlerConfig) -> None:
        self.config = config
        # On a busy machine the comparison with llama.cpp's kernels may turn out either way.
        with mock.patch.object(kernels, "speed", return_value=2.0):
            self.models = load_models(config)
        self.vocabulary = self.models.vocabulary

    def scheduler(self, *, idle_tokens: int = 0) -> Scheduler:
        """A scheduler that keeps so much of finished texts."""
        return Scheduler(
            self.models.target,
            self.models.drafters,
            prefill_rows=self.config.prefill_rows,
            idle_tokens=idle_tokens,
        )

    def generation(self, prompt: str | list[int], **fields: Any) -> Generation:
        """What one completion request asks for."""
        request = parse_body({"prompt": prompt, **fields}, CompletionRequest)
        prompts = Tokenizer(self.vocabulary, self.config).completion(request)
        [[generation]] = to_generations(request, prompts, self.vocabulary, self.models.grammars, self.config)
        return generation

    def answer(self, prompt: str | list[int], **fields: Any) -> Answered:
        """The answer to one completion request, alone and with empty caches."""
        scheduler = self.scheduler()
        generation = self.generation(prompt, **fields)
        scheduler.submit(generation)

        def chunks() -> Iterator[str]:
            while scheduler.busy:
                scheduler.step()
                yield generation.take_text()

        texts = list(chunks())
        assert generation.error is None
        return Answered(generation, texts, generation.finish_reason)

    def chat_prompt(self, *messages: Mapping[str, str]) -> str:
        """What the model's own template makes of a chat."""
        assert self.models.chat_template is not None
        return self.models.chat_template.render(messages)
