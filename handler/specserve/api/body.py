"""What the models of request bodies share: strict validation, and the names of fields that are ignored."""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError

Json = dict[str, Any]

# Ignored fields of a request that are named, and characters of each name; a body may have a million.
_MAX_NAMES, _MAX_NAME = 16, 100


class Body(BaseModel):
    """A JSON object of a request; pydantic keeps the fields that it does not know in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    # Names that are known although they are no fields.
    also_known: ClassVar[frozenset[str]] = frozenset()

    @property
    def ignored(self) -> list[str]:
        """The paths of the first that are ignored: fields (`messages[0].weight`), and tools (`tools[0].web_search`)."""
        return [path[:_MAX_NAME] for path in islice(self.ignored_paths(), _MAX_NAMES)]

    def ignored_paths(self, path: str = "") -> Iterator[str]:
        yield from (path + name for name in self.model_extra or () if name not in self.also_known)
        for name, value in self:
            parts = value if isinstance(value, list) and value and isinstance(value[0], Body) else []
            for index, part in enumerate(parts):
                yield from part.ignored_paths(f"{path}{name}[{index}].")
            if isinstance(value, Body):
                yield from value.ignored_paths(f"{path}{name}.")


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


def at_most(count: int) -> BeforeValidator:
    """Refuse a larger mapping before its values are validated, since each wrong one would be an error."""

    def check(mapping: Any) -> Any:
        if isinstance(mapping, dict) and len(mapping) > count:
            raise PydanticCustomError("too_long", "{sentence}", {"sentence": f"may have at most {count} entries"})
        return mapping

    return BeforeValidator(check)


# pydantic refuses lone surrogates, which JSON can spell and no tokenizer can read, in constrained strings only.
Text = Annotated[str, StringConstraints(min_length=0)]
AnyItem = TypeVar("AnyItem")
# Report only the first wrong item of a list, which may have a million.
Items = Annotated[list[AnyItem], Field(fail_fast=True)]


def refuse(*conflicts: tuple[object, str, str]) -> None:
    """Refuse a request that has one of these conflicts: whether it has it, the field that has to change, and why."""
    for is_there, param, problem in conflicts:
        if is_there:
            raise RequestError.invalid(param, f"'{param}' {problem}.")
