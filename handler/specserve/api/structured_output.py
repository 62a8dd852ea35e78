"""The fields of requests that give the whole answer a form: OpenAI's, vLLM's and llama.cpp's."""

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Json

from specserve.api.body import Body, Items, Text
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint

Schema = dict[str, Any]
NonEmptyText = Annotated[Text, Field(min_length=1)]
_ANY_OBJECT: Schema = {"type": "object"}


class SchemaDescription(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaDescription | None = None
    own_schema: Schema | None = Field(default=None, alias="schema")  # llama.cpp's place for it

    @property
    def answer_schema(self) -> Schema | None:
        if self.type == "text":
            return None
        schema = self.json_schema.json_schema if self.type == "json_schema" and self.json_schema else self.own_schema
        if schema is None and self.type == "json_schema":
            param = "response_format.json_schema"
            raise RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
        return _ANY_OBJECT if schema is None else schema


class StructuredOutputs(Body):
    """vLLM's form, which has one of these fields."""

    any_json: Schema | Json[Schema] | None = Field(default=None, alias="json")
    regex: NonEmptyText | None = None
    choice: Annotated[Items[NonEmptyText], Field(min_length=1)] | None = None
    grammar: NonEmptyText | None = None
    json_object: bool | None = None
    structural_tag: None = None


class Structure(NamedTuple):
    """What an answer follows, and the field that says so."""

    param: str
    kind: Literal["json_schema", "regex", "gbnf"]  # the compiler's method for it
    value: Any


class StructuredOutput(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema | None = None
    grammar: NonEmptyText | None = None

    @property
    def structure(self) -> Structure | None:
        """What the answer follows from its first token on.

        Raises:
            RequestError: 400; several fields say what.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        asked = [
            Structure("response_format", "json_schema", self.response_format and self.response_format.answer_schema),
            Structure("json_schema", "json_schema", self.json_schema),
            Structure("structured_outputs.json", "json_schema", outputs.any_json),
            Structure("structured_outputs.json_object", "json_schema", _ANY_OBJECT if outputs.json_object else None),
            Structure("structured_outputs.regex", "regex", outputs.regex),
            Structure("structured_outputs.choice", "gbnf", outputs.choice and _one_of(outputs.choice)),
            Structure("structured_outputs.grammar", "gbnf", outputs.grammar),
            Structure("grammar", "gbnf", self.grammar),
        ]
        found = [structure for structure in asked if structure.value is not None]
        if len(found) > 1:
            sentence = f"'{found[0].param}' and '{found[-1].param}' exclude each other."
            raise RequestError.invalid(found[-1].param, sentence)
        return found[0] if found else None

    @property
    def answer_schema(self) -> Schema | None:
        structure = self.structure
        return structure.value if structure and structure.kind == "json_schema" else None

    def constraint(self, grammars: GrammarCompiler) -> Constraint | None:
        """Compile what the answer follows.

        Raises:
            RequestError: 400; it cannot be compiled.
        """
        structure = self.structure
        return structure and getattr(grammars, structure.kind)(structure.value)


def _one_of(choices: list[str]) -> str:
    """Return the grammar of these texts, in GBNF."""
    escaped = (re.sub(r'["\\\n\r]', lambda found: f"\\x{ord(found[0]):02x}", text) for text in choices)
    return "root ::= " + " | ".join(f'"{text}"' for text in escaped)
