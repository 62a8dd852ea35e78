"""Errors a person reads: each carries one sentence that says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import ClassVar


class SpecserveError(Exception):
    """Any failure with a sentence for the user; `exit_code` is what a command of ours exits with."""

    exit_code: ClassVar[int] = 1


class EnvironmentFailure(SpecserveError):
    """The machine, the network or a download is at fault (exit 1)."""


class ConfigError(SpecserveError):
    """A configuration file or a command line is wrong (exit 2)."""

    exit_code = 2


class ModelLoadError(SpecserveError):
    """A model file cannot be used, alone or as a pair (exit 3)."""

    exit_code = 3


class EngineError(SpecserveError):
    """A forward pass failed; the sequences in it cannot go on."""


class DraftError(EngineError):
    """The draft model failed; every sequence can go on without it."""


class ConstraintError(SpecserveError):
    """A grammar has become too costly to follow; the sequence that has it cannot go on."""


class MaskDeferred(ConstraintError):
    """The round has no time left for another mask of a grammar; the sequence can go on in the next one."""


class RequestError(SpecserveError):
    """A client's request cannot be answered; becomes OpenAI's error JSON and never reaches the engine."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object, ready for JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
