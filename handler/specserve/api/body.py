"""What the models of request bodies share: how strictly they validate, and which fields they do not know."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError

# Unknown fields of a request that are named, and characters of each; a body may have a million.
_MAX_UNKNOWN, _MAX_NAME = 16, 100


class Body(BaseModel):
    """A JSON object of a request; `unknown` has the paths of fields that no model of it knows, the first few."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    # Names that are known although they are no fields.
    also_known: ClassVar[frozenset[str]] = frozenset()
    _unknown: list[str] = PrivateAttr(default_factory=list)

    @property
    def unknown(self) -> list[str]:
        """The paths of the unknown fields of the body that `note_unknown` was given."""
        return self._unknown

    @property
    def ignored(self) -> list[str]:
        """The paths of all that is ignored: the unknown fields, and the tools that the model is not offered."""
        return self._unknown + [path[:_MAX_NAME] for path in islice(self._not_offered(), _MAX_UNKNOWN)]

    def _not_offered(self) -> Iterator[str]:
        return iter(())

    def note_unknown(self, body: object) -> None:
        """Find the unknown fields of the body that this was made from."""
        self._unknown = [path[:_MAX_NAME] for path in islice(_unknown(self, body, ""), _MAX_UNKNOWN)]


class Part(Body):
    """A part of a content, of one of the types that its field `type` names."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_known_type(cls, part: Any) -> Any:
        known = get_args(cls.model_fields["type"].annotation)
        if isinstance(part, dict) and part.get("type", known[0]) not in known:
            types = " or ".join(f"'{kind}'" for kind in known)
            sentence = f"must be a part of type {types}; images, audio and files are not supported"
            raise PydanticCustomError("other_part", "{sentence}", {"sentence": sentence})
        return part


def _unknown(value: object, body: object, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields, in the order of the body: `messages[0].weight`."""
    if isinstance(value, Body) and isinstance(body, dict):
        fields = {field.alias or name: name for name, field in type(value).model_fields.items()}
        for name, inner in body.items():
            inside = f"{path}.{name}" if path else name
            if name in fields:
                yield from _unknown(getattr(value, fields[name]), inner, inside)
            elif name not in value.also_known:
                yield inside
    elif isinstance(value, list) and isinstance(body, list) and value and isinstance(value[0], Body):
        for index, (part, inner) in enumerate(zip(value, body, strict=False)):
            yield from _unknown(part, inner, f"{path}[{index}]")


def at_most(count: int) -> BeforeValidator:
    """Refuse a larger mapping before its values are validated, since each wrong one would be an error."""

    def check(mapping: Any) -> Any:
        if isinstance(mapping, dict) and len(mapping) > count:
            raise PydanticCustomError("too_long", "{sentence}", {"sentence": f"may have at most {count} entries"})
        return mapping

    return BeforeValidator(check)


def _is_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer can read."""
    text.encode()  # raises a ValueError, which pydantic reports
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
AnyItem = TypeVar("AnyItem")
# Of a list with a million wrong items the first one is the error.
Items = Annotated[list[AnyItem], Field(fail_fast=True)]


def disagreement(param: str, sentence: str) -> RequestError:
    """Return the error of fields that exclude or need each other, which pydantic lets pass; `param` has to change."""
    return RequestError.invalid(param, f"Invalid request: {sentence}.")
