"""Renders chat messages with the model's own template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specserve.errors import ModelLoadError, RequestError


class ChatTemplate:
    """The chat template of a GGUF; it is untrusted code, so it runs in Jinja's sandbox.

    Raises:
        ModelLoadError: the template cannot be compiled.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        # Jinja's own filter escapes HTML; chat templates expect this one.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"The model's chat template cannot be compiled: {error}.") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message.

        Raises:
            RequestError: 400; the template refuses these messages.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}.", param="messages", code="invalid_value"
            ) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
