"""Reads the model YAML: TorchServe's own keys, and ours below `handler:`, which pydantic validates."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specserve.errors import ConfigError
from specserve.machine import parse_cores

_Keys = TypeVar("_Keys", bound=BaseModel)
_EXAMPLE = "config/smollm2-135m.yaml is a short example"


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
CacheType = Literal["f16", "q8_0"]
# Tokens; a model that was trained for fewer is refused.
LEAST_CONTEXT = 64


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    path: Path | None = None  # always set in an archive, where a name without a directory is looked up
    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+/[^/]+$")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    adapter: Path | None = None
    requantise: Literal["q4_0"] | None = None
    source: ModelConfig | None = None  # in an archive: where the file can be fetched, if it can

    @model_validator(mode="after")
    def _has_a_place(self) -> ModelConfig:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give either `path` (a GGUF file) or `hub` (OWNER/REPOSITORY/FILE)")
        return self


class SpeculationConfig(_Section):
    mode: Annotated[Literal["auto", "fixed", "off"], _OFF] = "auto"
    gamma: int = Field(default=3, ge=1, le=32)
    max_gamma: int = Field(default=15, ge=1, le=32)
    holdback: float = Field(default=0.0, ge=0, le=0.5)
    history_tokens: int = Field(default=1_000_000, ge=0, le=2**31)
    corpus: list[Path] = []

    @model_validator(mode="after")
    def _default_within_cap(self) -> SpeculationConfig:
        if self.gamma > self.max_gamma:
            raise ValueError("`gamma` may not be larger than `max_gamma`")
        return self


class HandlerConfig(_Section):
    """What stands below `handler:` in a model YAML; config/qwen2.5-coder-0.5b-1.5b.yaml explains every key."""

    model_id: str = Field(min_length=1)
    target: ModelConfig
    draft: ModelConfig | None = None
    models_directory: Path | None = None
    fetch_models: bool = False
    sequences: int = Field(default=8, ge=1, le=64)
    context_length: int = Field(default=32768, ge=LEAST_CONTEXT)
    cache_type: CacheType = "f16"
    cache_tokens: int = Field(default=32768, ge=LEAST_CONTEXT)
    kernels: Annotated[Literal["auto", "off"], _OFF] = "auto"
    threads: int | None = Field(default=None, ge=1)
    cores: Cores | None = None
    max_wait_ms: float | None = Field(default=None, ge=1)
    prefix_cache_mib: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    responses_store: int = Field(default=0, ge=0)
    speculation: SpeculationConfig = SpeculationConfig()
    control_tokens: Literal["all", "messages", "none"] = "messages"
    trace: Path | None = None

    @model_validator(mode="after")
    def _sequence_within_the_cache(self) -> HandlerConfig:
        if {"context_length", "cache_tokens"} <= self.model_fields_set and self.cache_tokens < self.context_length:
            raise ValueError("`cache_tokens` may not be less than `context_length`")
        return self


def cache_directory() -> Path:
    """Return the directory that holds models and measurements: $SPECSERVE_CACHE, or a directory below ~/.cache."""
    cache = os.environ.get("SPECSERVE_CACHE")
    return Path(cache).expanduser() if cache else Path.home() / ".cache" / "specserve"


class TorchServeKeys(BaseModel):
    """Those of TorchServe's own keys that matter here; TorchServe validates the others."""

    model_config = ConfigDict(strict=True)

    # With a second worker TorchServe's continuous batching hangs: idle workers hold the queue's lock while they wait.
    minWorkers: Literal[0, 1] = 1  # noqa: N815 - TorchServe's names
    maxWorkers: Literal[0, 1] = 1  # noqa: N815
    continuousBatching: Literal[True]  # noqa: N815
    startupTimeout: int = 120  # noqa: N815


def parse_handler(section: object, where: str) -> HandlerConfig:
    """Validate the `handler:` section; `where` names the file in the error message."""
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: there is no `handler:` section; {_EXAMPLE}.")
    return _validated(HandlerConfig, section, where, "handler")


def load_yaml(path: Path) -> tuple[dict[str, Any], HandlerConfig]:
    """Read a model YAML: the whole document, and its validated `handler:` section."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: is not a mapping of keys; {_EXAMPLE}.")
    _validated(TorchServeKeys, document, str(path))
    return document, parse_handler(document.get("handler"), str(path))


def _validated(kind: type[_Keys], section: dict[str, Any], where: str, *above: str) -> _Keys:
    """Validate keys; pydantic's first error becomes a sentence that names the file and the key."""
    try:
        return kind.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ") + "."
        if first["type"] == "extra_forbidden":
            wrong = str(first["loc"][-1])
            names = {name for known in _Section.__subclasses__() for name in known.model_fields} - {wrong}
            near = "".join(f" Did you mean `{name}`?" for name in get_close_matches(wrong, names, 1))
            message = f"there is no such key.{near}"
        key = ".".join(map(str, (*above, *first["loc"])))
        raise ConfigError(f"{where}: `{key}`: {message}") from error
