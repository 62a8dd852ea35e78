"""What the models of request bodies share: how strictly they validate, and the errors that pydantic does not have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "unknown_field"


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, body: Any) -> Any:
        """Name one unknown field; pydantic would make an error for each of a million."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in body if name not in known), None) if isinstance(body, dict) else None
        if unknown is not None:
            field = unknown.encode("utf-8", errors="replace").decode()
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"field": field})
        return body


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


class LooseBody(Body):
    """A JSON object of which unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, body: Any) -> Any:
        return body
