"""Target and draft loaded as by a worker, completion requests run on them, and tiny model files to load."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.api.chat_template import chat_template_of
from specserve.api.parse import parse_body
from specserve.api.prompt import Tokenizer
from specserve.api.request_schema import CompletionRequest
from specserve.api.resolve import resolve
from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig
from specserve.core.loading import load_models
from specserve.core.prefix_store import PrefixStore
from specserve.core.scheduler import Scheduler
from specserve.core.text_sequence import TextSequence
from specserve.engine.kernels import Mode
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, quantise
from tiny_models import write_tiny

# No pool: what an answer wrote would be drafted for the next one.
PLAIN = {"mode": "off", "pool": ""}
# llama.cpp's own kernels have to pass the same tests: SPECSERVE_TEST_KERNELS=off scripts/test tests/engine
KERNELS: Mode = "off" if os.environ.get("SPECSERVE_TEST_KERNELS") == "off" else "auto"


def open_engine(model: Path | LlamaModel, **options: Any) -> LlamaEngine:
    """An engine with small buffers; `options` are arguments of `LlamaEngine`."""
    if isinstance(model, Path):
        model = LlamaModel(model)
    small = {"n_slots": 3, "context_length": 256, "threads": 1, "max_rows": 64, "max_logits": 32}
    return LlamaEngine(model, **(small | options))


def fixed_gamma(gamma: int) -> dict[str, Any]:
    """The `speculation` object of a request for `gamma` drafts a round."""
    return {"mode": "fixed", "gamma": gamma, "pool": ""}


class TinyFiles:
    """Tiny models in a directory, each written on first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, architecture: str, role: str) -> Path:
        """The file of one model, Q4_0 in all tensors: its logits do not depend on the number of rows in a pass."""
        file = self._directory / f"{architecture}-{role}.gguf"
        if not file.exists():
            single = self._directory / "single.gguf"
            write_tiny(single, architecture, role)
            assert quantise(single, file)
        return file

    def config(self, target: str, draft: str | None = None, *, context_length: int = 256) -> HandlerConfig:
        """A worker's configuration; the draft has the target's architecture unless `draft` names another."""
        return HandlerConfig(
            model_id="tiny",
            kernels=KERNELS,
            target=ModelConfig(path=self.path(target, "target")),
            draft=ModelConfig(path=self.path(draft or target, "draft")),
            sequences=3,
            context_length=context_length,
            threads=1,
            # The tiny draft is as slow as its target: in adaptive mode the controller would not use it.
            speculation=SpeculationConfig(mode="fixed"),
        )


@dataclass(frozen=True)
class Completion:
    sequence: TextSequence
    chunks: list[str]  # in which its text was streamed
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.chunks)


class Pair:
    """Target and draft, loaded."""

    def __init__(self, config: HandlerConfig) -> None:
        self.config = config
        self.models = load_models(config)
        self.vocabulary = self.models.vocabulary
        self.chat_template = chat_template_of(self.vocabulary)

    def scheduler(self, store: PrefixStore | None = None) -> Scheduler:
        """A scheduler whose KV caches are empty."""
        model = self.models.drafters.model
        for cache in (self.models.target, *([model.cache] if model else [])):
            for slot in range(cache.n_slots):
                cache.truncate(slot, 0)
        return Scheduler(self.models.target, self.models.drafters, prefill_rows=16, store=store)

    def sequence(self, prompt: str | list[int], **fields: Any) -> TextSequence:
        """The sequence of one completion request."""
        request = parse_body({"prompt": prompt, **fields}, CompletionRequest)
        prompts = Tokenizer(self.vocabulary, self.config).completion(request)
        _, [sequence] = resolve(request, prompts, self.vocabulary, self.models.grammars, self.config)
        return sequence

    def complete(self, prompt: str | list[int], **fields: Any) -> Completion:
        """Run one completion request alone, from empty KV caches."""
        scheduler, chunks = self.scheduler(), []
        sequence = self.sequence(prompt, **fields)
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.run_round()
            chunks.append(sequence.take_text())
        assert sequence.error is None
        return Completion(sequence, chunks, sequence.finish_reason)
