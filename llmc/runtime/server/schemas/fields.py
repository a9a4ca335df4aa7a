"""The bases of all request bodies and of the objects in them."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator


class Fields(BaseModel):
    """Null means the same as a missing field: some clients write out every field that they know."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


class Readable(Fields):
    """A body that may have fields that this server does not support; they are dropped, and `left_out` describes them in
    sentences."""

    _left_out: tuple[str, ...] = PrivateAttr(default=())

    @property
    def left_out(self) -> Sequence[str]:
        return self._left_out

    @classmethod
    def readable(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The body without unsupported parts, and a warning for each kind of them."""
        return body, []

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body, left_out = cls.readable(given) if isinstance(given, dict) else (given, [])
        instance = handler(body)
        instance._left_out = tuple(left_out)
        return instance


def unknown_in(place: str, given: object) -> Iterator[str]:
    """A sentence for each unknown field of an object, or of the objects of a list. place: the path to it."""
    if isinstance(given, list):
        for index, entry in enumerate(given):
            yield from unknown_in(f"{place}.{index}", entry)
    elif isinstance(given, BaseModel):
        yield from (f"unknown field {place}.{name} is ignored" for name in given.model_extra or ())
        for name in type(given).model_fields:
            yield from unknown_in(f"{place}.{name}", getattr(given, name))


def known_of(given: BaseModel) -> dict[str, Any]:
    """The known fields of an object that have a value, those of the objects in it included."""
    values = {name: getattr(given, name) for name in type(given).model_fields if getattr(given, name) is not None}
    return {name: known_of(value) if isinstance(value, BaseModel) else value for name, value in values.items()}
