"""The fields of requests that give the answer a form: OpenAI's `response_format`, a grammar, and vLLM's names."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specserve.api.body import Body, Text
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint

# How the forms of structured output are named by vLLM, old and new, and by llama.cpp.
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {**{f"guided_{form}": form for form in _STRUCTURES}, "json_schema": "json"}
OTHER_NAMES = frozenset(_GUIDED) | {"structured_outputs"}


class SchemaDescription(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer; `regex` is vLLM's, for text that matches as a whole."""

    also_known: ClassVar[frozenset[str]] = frozenset({"schema"})

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: SchemaDescription | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type in ("json_schema", "regex") and getattr(self, self.type) is None:
            param = f"response_format.{self.type}"
            raise RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
        return self


class StructuredOutput(Body):
    """The fields that constrain the whole answer."""

    response_format: ResponseFormat | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None

    @property
    def format(self) -> Literal["text", "json_object", "json_schema", "regex"]:
        """What `response_format` asks for."""
        return self.response_format.type if self.response_format else "text"

    @property
    def follows_grammar(self) -> bool:
        """Whether a grammar or a format holds from the first token on."""
        return self.grammar is not None or self.format != "text"

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that `response_format` asks for."""
        form = self.response_format
        if form and form.type == "json_schema" and form.json_schema:
            return form.json_schema.json_schema
        return {"type": "object"} if self.format == "json_object" else None

    def constraint(self, grammars: GrammarCompiler) -> Constraint | None:
        """Compile the grammar that the answer follows, if there is one.

        Raises:
            RequestError: 400; it cannot be compiled.
        """
        form, schema = self.response_format, self.answer_schema
        if self.grammar is not None:
            return grammars.gbnf(self.grammar)
        if form and form.type == "regex" and form.regex:
            return grammars.regex(form.regex)
        return None if schema is None else grammars.json_schema(schema)


def with_structure(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body where what vLLM and llama.cpp call the structure is `response_format` or `grammar`.

    Raises:
        RequestError: 400; several fields ask for a structure, or one is not understood.
    """
    outputs, form = body.get("structured_outputs"), body.get("response_format")
    outputs = {} if outputs is None else outputs
    if not isinstance(outputs, dict) or outputs.get("structural_tag") is not None:
        sentence = f"'structured_outputs' must be an object with one of {', '.join(_STRUCTURES)}."
        raise RequestError.invalid("structured_outputs", sentence)
    named = [(name, _GUIDED[name], body.get(name)) for name in _GUIDED]
    named += [(f"structured_outputs.{kind}", kind, outputs.get(kind)) for kind in _STRUCTURES]
    wanted = [(name, kind, value) for name, kind, value in named if value is not None and value is not False]
    if not wanted:
        # llama.cpp's form.
        if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema") and "schema" in form:
            form = {"json_schema": {"schema": form["schema"]}, **form, "type": "json_schema"}
            return {**body, "response_format": form}
        return body
    name, kind, value = wanted[0]
    is_formatted = form is not None and form != {"type": "text"}
    if len(wanted) > 1 or is_formatted or body.get("grammar") is not None:
        raise RequestError.invalid(name, f"Invalid request: '{name}' excludes other fields about the output's form.")
    if kind in ("grammar", "choice"):
        return {**body, "grammar": value if kind == "grammar" else _one_of(value, name)}
    if kind == "json":
        form = {"type": "json_schema", "json_schema": {"schema": _parsed(value, name)}}
    else:
        form = {"type": kind, "regex": value} if kind == "regex" else {"type": kind}
    return {**body, "response_format": form}


def _parsed(schema: object, name: str) -> object:
    """Return a schema that may be spelled as JSON text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError.invalid(name, f"Invalid value for '{name}': it is not valid JSON.") from error


def _one_of(choices: object, name: str) -> str:
    """Return the grammar of these texts, in GBNF."""
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise RequestError.invalid(name, f"Invalid value for '{name}': must be a list of strings, none of them empty.")
    escaped = (re.sub(r'["\\\n\r]', lambda found: f"\\x{ord(found[0]):02x}", text) for text in choices)
    return "root ::= " + " | ".join(f'"{text}"' for text in escaped)
