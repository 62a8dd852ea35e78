"""Reads the model YAML: TorchServe's own keys, and ours below `handler:`, which pydantic validates."""

from __future__ import annotations

import os
import platform
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specserve.errors import ConfigError
from specserve.machine import parse_cores


def _cores(value: object) -> object:
    """Read a list of cores; YAML reads a single core as a number."""
    if not isinstance(value, str | int):
        return value
    try:
        return parse_cores(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is no list of cores such as 0-3,8") from None


Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_cores), Field(min_length=1)]


# YAML reads a bare `off` as false.
_OFF = BeforeValidator(lambda value: "off" if value is False else value)

# How keys and values are kept: 16 or 8 bits a number.
CacheType = Literal["f16", "q8_0"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """Where a GGUF file comes from, and whether it is requantised."""

    path: Path | None = Field(default=None, description="The file; always set in an archive.")
    hub: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+/[\w.-]+/[^/]+$",
        description="The file on the model hub, as OWNER/REPOSITORY/FILE; not needed if it is in the models directory.",
    )
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="The file's checksum; default: the one that the hub states.",
    )
    requantise: Literal["q4_0"] | None = Field(
        default=None, description="q4_0: every tensor is stored as Q4_0, by scripts/prepare; default: as published."
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> ModelConfig:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give either `path` (a GGUF file) or `hub` (OWNER/REPOSITORY/FILE)")
        return self


class SpeculationConfig(_Section):
    """The mode of speculation that requests have by default, and the maxima of what they may set."""

    mode: Annotated[Literal["auto", "fixed", "off"], _OFF] = Field(
        default="auto",
        description="auto: the controller decides how many tokens are drafted; fixed: `gamma`; off: none.",
    )
    gamma: int = Field(default=3, ge=1, le=32, description="Draft tokens per round in mode fixed.")
    max_gamma: int = Field(
        default=15,
        ge=1,
        le=32,
        description="Maximum draft tokens per round; with the token before them 16 rows, a tile with AVX-512.",
    )
    holdback: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Share of the requests that go without drafts, as a control group that measures the speed-up; "
        "default: no control group.",
    )
    history_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=2**31,
        description="Tokens of finished answers that lookups of later requests with the same pool search; all pools "
        "together have room for eight times as many; 16 bytes a token; 0: none.",
    )
    corpus: list[Path] = Field(default=[], description="Text files that lookups of all requests search.")

    @model_validator(mode="after")
    def _default_within_cap(self) -> SpeculationConfig:
        if self.gamma > self.max_gamma:
            raise ValueError("`gamma` may not be larger than `max_gamma`")
        return self


class HandlerConfig(_Section):
    """Everything that stands below `handler:` in a model YAML."""

    model_id: str = Field(description="The model id in v1/models.", min_length=1)
    target: ModelConfig
    draft: ModelConfig | None = None
    sequences: int = Field(default=8, ge=1, le=64, description="Maximum sequences that decode at the same time.")
    context_length: int = Field(
        default=32768,
        ge=64,
        description="Maximum tokens of prompt and output, per sequence; default: 32768, or less if the model was "
        "trained with less or `cache_tokens` is less.",
    )
    cache_type: CacheType = Field(
        default="f16",
        description="Precision of the target's KV cache: f16, or q8_0 for half the memory a token (what that costs in "
        "quality: benchmarks/perplexity.py).",
    )
    cache_tokens: int = Field(
        default=32768,
        ge=64,
        description="Maximum tokens that the KV cache holds for all sequences together, and of finished ones for "
        "prompts that begin alike; default: 32768, or `context_length` if that is more. Where memory is short, fewer.",
    )
    kernels: Annotated[Literal["auto", "off"], _OFF] = Field(
        default="auto",
        description="auto: specserve's own matrix products and attention, if they work and are faster here; off: "
        "llama.cpp's.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Maximum compute threads; default: one for each physical core, within a cgroup's quota.",
    )
    cores: Cores | None = Field(
        default=None,
        description="The cores that they may run on, such as 0-3,8; default: all that the process may use, divided "
        "with other workers of the same user while these are busy.",
    )
    max_wait_ms: float | None = Field(
        default=None,
        ge=1,
        description="Maximum extra latency that prefill, grammar masks and drafts may each add to a round of others, "
        "in ms; default: 250, or the time of seven "
        "forward passes of one token if that is more, since smaller chunks cost more per token.",
    )
    prefix_cache_mib: int | None = Field(
        default=None,
        ge=0,
        description="Host memory for prefixes that have left the KV cache, in MiB; default: a quarter of what is "
        "available, also to the cgroup, when the models are loaded; 0: none.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum output tokens that a request may ask for; default: as many as the context holds.",
    )
    responses_store: int = Field(
        default=0,
        ge=0,
        description="Responses of v1/responses that are kept in memory for `previous_response_id`; default: none.",
    )
    speculation: SpeculationConfig = SpeculationConfig()
    control_tokens: Literal["all", "messages", "none"] = Field(
        default="messages",
        description="Texts of chats in which the name of a control token (<|im_end|>) is that token: all; messages: "
        "all but the results of tools; none. Elsewhere it is plain text.",
    )
    trace: Path | None = Field(
        default=None, description="Directory in which every round is recorded, for scripts/report; default: no trace."
    )

    @model_validator(mode="after")
    def _sequence_within_the_cache(self) -> HandlerConfig:
        if {"context_length", "cache_tokens"} <= self.model_fields_set and self.cache_tokens < self.context_length:
            raise ValueError("`cache_tokens` may not be less than `context_length`")
        return self


def cache_directory() -> Path:
    """Return the directory that holds models and measurements: $SPECSERVE_CACHE, or a directory below ~/.cache."""
    cache = os.environ.get("SPECSERVE_CACHE")
    return Path(cache).expanduser() if cache else Path.home() / ".cache" / "specserve"


def processor() -> str:
    """Return the processor's name and features, by which measurements are kept."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part"))}))


class TorchServeKeys(BaseModel):
    """Those of TorchServe's own keys that matter here; TorchServe validates the others."""

    model_config = ConfigDict(strict=True)

    # With a second worker TorchServe's continuous batching hangs: idle workers hold the queue's lock while they wait.
    minWorkers: Literal[0, 1] = 1  # noqa: N815 - TorchServe's names
    maxWorkers: Literal[0, 1] = 1  # noqa: N815
    continuousBatching: Literal[True]  # noqa: N815
    startupTimeout: int = 120  # noqa: N815


def parse_handler(section: object, where: str) -> HandlerConfig:
    """Validate the `handler:` section; `where` names the file in the error message.

    Raises:
        ConfigError: the section is missing or a key in it is wrong.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: there is no `handler:` section; config/smollm2-135m.yaml is a short example.")
    try:
        return HandlerConfig.model_validate(section)
    except ValidationError as error:
        raise _explained(error, where, "handler") from error


def _explained(error: ValidationError, where: str, *above: str) -> ConfigError:
    """Return pydantic's first error as a sentence that names the file and the key."""
    first = error.errors()[0]
    key = ".".join(map(str, (*above, *first["loc"])))
    message = first["msg"].removeprefix("Value error, ") + "."
    if first["type"] == "extra_forbidden":
        wrong = str(first["loc"][-1])
        names = {name for section in _Section.__subclasses__() for name in section.model_fields} - {wrong}
        near = "".join(f" Did you mean `{name}`?" for name in get_close_matches(wrong, names, 1))
        message = f"there is no such key.{near}"
    return ConfigError(f"{where}: `{key}`: {message}")


def load_yaml(path: Path) -> tuple[dict[str, Any], HandlerConfig]:
    """Read a model YAML: the whole document, and its validated `handler:` section.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a key of ours is wrong.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: is not a mapping of keys; config/smollm2-135m.yaml is a short example.")
    try:
        TorchServeKeys.model_validate(document)
    except ValidationError as error:
        raise _explained(error, str(path)) from error
    return document, parse_handler(document.get("handler"), str(path))
