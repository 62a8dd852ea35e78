"""A Hugging Face tokenizer built from the vocabulary in a GGUF, for clients that count tokens themselves."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer

# transformers' names and GGUF's. Its own GGUF reader maps them too, but needs PyTorch for the weights.
VOCABULARY = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}
CONTROL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}


def save_tokenizer(model: Path, directory: Path) -> None:
    fields = GGUFReader(model).fields

    def value(name: str) -> Any:
        field = fields.get(name)
        return None if field is None else field.contents()

    stored = {ours: value(f"tokenizer.ggml.{theirs}") for ours, theirs in VOCABULARY.items()}
    vocabulary = {name: content for name, content in stored.items() if content is not None}
    backend, _ = convert_gguf_tokenizer(value("general.architecture"), vocabulary)
    ids = {name: value(f"tokenizer.ggml.{key}") for name, key in CONTROL.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=value("tokenizer.chat_template"),
        **{name: vocabulary["tokens"][token] for name, token in ids.items() if token is not None},
    )
    tokenizer.save_pretrained(directory)
