"""JSON to frozen dataclasses and back, strictly: an unknown, missing or mistyped field is an EngineFormatError."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

from llmc.errors import EngineFormatError

T = TypeVar("T")

_SCALARS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
REBUILD = "the file is damaged or was edited: rebuild the engine with `llmc build`"


def to_json(value: Any) -> Any:
    """The plain JSON value of a dataclass, enum, tuple, dict or scalar; fields keep their declared order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: Any, at: str) -> T:
    """A `kind` made of a parsed JSON value. at: where the value stands, for the error.

    Understands dataclasses, enums, tuple[X, ...], dict[str, X], X | None, bool, int, float, str, unions of these
    four and None, and Any.
    """
    decoded: T = _decode(kind, value, at)
    return decoded


def _decode(kind: Any, value: Any, at: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_fields(kind, value, at)
    if isinstance(kind, enum.EnumType):
        members: tuple[enum.Enum, ...] = tuple(kind)
        names = [member.value for member in members]
        _expect(value in names, f"one of {', '.join(names)}", value, at)
        return kind(value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value, at)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", value, at)
        return tuple(_decode(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, at)
        return {key: _decode(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), "a number", value, at)
        return float(value)
    _expect(type(value) is kind, _SCALARS[kind], value, at)
    return value


def _decode_union(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) == 1:
        return _decode(others[0], value, at)
    _expect(type(value) in others, " or ".join(_SCALARS[kind] for kind in others), value, at)
    return value


def _decode_fields(kind: type, value: Any, at: str) -> Any:
    _expect(isinstance(value, dict), "an object", value, at)
    hints = _field_types(kind)
    unknown = sorted(value.keys() - hints.keys())
    if unknown:
        raise EngineFormatError(f"unknown field {unknown[0]!r}", at=at, fix=REBUILD)
    missing = sorted(hints.keys() - value.keys())
    if missing:
        raise EngineFormatError(f"the field {missing[0]!r} is missing", at=at, fix=REBUILD)
    return kind(**{name: _decode(hint, value[name], f"{at}.{name}") for name, hint in hints.items()})


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _expect(condition: bool, wanted: str, value: Any, at: str) -> None:
    if not condition:
        seen = repr(value)
        raise EngineFormatError(f"expected {wanted}, found {seen[:80]}", at=at, fix=REBUILD)
