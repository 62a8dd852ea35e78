"""Errors, whose messages for users are sentences that say what is wrong, where, and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

logger = logging.getLogger(__name__)


class SpecserveError(Exception):
    """Any failure that has a message for the user; our commands end with its `exit_code`."""

    exit_code: ClassVar[int] = 1


class EnvironmentFailure(SpecserveError):
    """The machine, the network or a download failed (exit 1)."""


class ConfigError(SpecserveError):
    """A configuration file or a command line is wrong (exit 2)."""

    exit_code = 2


class ModelLoadError(SpecserveError):
    """A model file cannot be used, or draft and target do not match (exit 3)."""

    exit_code = 3


class EngineError(SpecserveError):
    """A forward pass failed; its sequences cannot continue."""


class MaskDeferred(SpecserveError):
    """The round has no time left for a grammar mask; the sequence continues in the next round."""


class Unusable(Exception):
    """A schema, a grammar or the kernels cannot be used; the message says why, and callers say what."""


@dataclass(eq=False)
class RequestError(SpecserveError):
    """A request is refused or failed; its response is OpenAI's error object."""

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        """Return this error with the name that the client has for its field; `names` are the client's, by ours."""
        param = names.get(re.split(r"[.\[]", self.param or "", maxsplit=1)[0])
        if param is None:
            return self
        message = self.message.replace(f"'{self.param}'", f"'{param}'")
        return RequestError(message, param=param, code=self.code, status=self.status, kind=self.kind)

    @classmethod
    def invalid(cls, param: str, message: str) -> RequestError:
        return cls(message, param=param, code="invalid_value")


@dataclass(eq=False)
class ConstraintError(RequestError):
    """A sequence cannot continue: no token is allowed, or its grammar is too costly to follow."""

    code: str | None = field(default="grammar_too_costly", kw_only=True)


@dataclass
class Contained(AbstractContextManager[Any]):
    """Ends one request for whatever is raised within, so that no other fails; only what ends the process goes on."""

    request_id: str  # TorchServe's, for the log
    fail: Callable[[RequestError], object]  # is given the error that the client is told

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        # The panics of llguidance, which is written in Rust, are no Exception.
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
            return False
        if not isinstance(error, RequestError):
            logger.error("specserve: request %s failed", self.request_id, exc_info=error)
            sentence = "The server failed to answer this request; its log says why."
            error = RequestError(sentence, status=500, kind="server_error")
        self.fail(error)
        return True


@dataclass
class LoggedOnce(AbstractContextManager[Any]):
    """Keeps an `Exception` raised within from all requests; only the first is logged."""

    sentence: str  # what it means for the operator
    has_failed: bool = False

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.has_failed:
            logger.error("specserve: %s", self.sentence, exc_info=error)
        self.has_failed = True
        return True
