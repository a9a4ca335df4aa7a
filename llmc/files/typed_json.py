"""JSON to frozen dataclasses and back, strictly: an unknown, missing or mistyped field is an EngineFormatError."""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from llmc.errors import EngineFormatError

T = TypeVar("T")

_SCALARS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
# Metadata of a dataclass' field with a default: it is written only where its value is another.
LEFT_OUT = {"left_out": True}
REBUILD = "the file is damaged or was edited: rebuild the engine: llmc build MODEL -o ENGINE"
_ANOTHER_WROTE_IT = (
    "another llmc has written the file, or it was edited: rebuild the engine: llmc build MODEL -o ENGINE"
)


def to_json(value: Any) -> Any:
    """The plain JSON value of a dataclass, enum, tuple, dict or scalar; fields keep their declared order."""
    if hasattr(value, "from_text"):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {f.name: to_json(own) for f, own in fields if f.metadata != LEFT_OUT or own != f.default}
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
    four and None, and Any. A class with `from_text` is read from a string. In a union of such classes and enums, the
    first that accepts the string is used. from_text(text): the value, None if the text does not belong to this class,
    or a ValueError with the reason.
    """
    wanted: Any = kind
    try:
        decoded: T = _decoder(wanted)(value)
    except _MismatchError as error:
        raise EngineFormatError(error.problem, at=at + "".join(reversed(error.path)), fix=_ANOTHER_WROTE_IT) from None
    return decoded


class _MismatchError(Exception):
    """A value that does not have the expected type. path: from the value that does not fit outwards; it is only put
    together when there is one."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


_Decoder = Callable[[Any], Any]


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    """The decoder of a `kind`, cached: an engine's program has thousands of values and is parsed at each start."""
    if kind is Any:
        return _as_it_is
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and not hasattr(kind, "from_text"):
        return _fields_decoder(kind)
    if isinstance(kind, enum.EnumType):
        return functools.partial(_member, _members(kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_decoder(arguments)
    if hasattr(kind, "from_text"):
        return functools.partial(_parsed, kind.from_text)
    if origin is tuple:
        return functools.partial(_list, _decoder(arguments[0]))
    if origin is dict:
        return functools.partial(_object, _decoder(arguments[1]))
    return _float if kind is float else functools.partial(_scalar, kind)


def _as_it_is(value: Any) -> Any:
    return value


def _float(value: Any) -> float:
    _expect(isinstance(value, int | float) and not isinstance(value, bool), "a number", value)
    return float(value)


def _scalar(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _unexpected(_SCALARS[kind], value)
    return value


def _parsed(parse: _Decoder, value: Any) -> Any:
    _expect(isinstance(value, str), "a text", value)
    try:
        parsed = parse(value)
    except ValueError as error:
        raise _MismatchError(str(error)) from None
    return parsed


def _member(by_value: dict[Any, enum.Enum], value: Any) -> enum.Enum:
    _expect(isinstance(value, str) and value in by_value, f"one of {', '.join(map(str, by_value))}", value)
    return by_value[value]


def _members(kind: enum.EnumType) -> dict[Any, enum.Enum]:
    members: tuple[enum.Enum, ...] = tuple(kind)
    return {member.value: member for member in members}


def _union_decoder(kinds: tuple[Any, ...]) -> _Decoder:
    others = [kind for kind in kinds if kind is not types.NoneType]
    takes_none = len(others) < len(kinds)
    only = _decoder(others[0]) if len(others) == 1 else None
    scalars = [kind for kind in others if kind in _SCALARS]
    parsers: list[_Decoder] = [kind.from_text for kind in others if hasattr(kind, "from_text")]
    parsers += [_members(kind).get for kind in others if isinstance(kind, enum.EnumType)]

    def decode(value: Any) -> Any:
        if value is None and takes_none:
            return None
        if only is not None:
            return only(value)
        if type(value) is str:
            for parse in parsers:
                parsed = _parsed(parse, value)
                if parsed is not None:
                    return parsed
        _expect(type(value) in scalars, " or ".join(_SCALARS[kind] for kind in scalars), value)
        return value

    return decode


def _list(item: _Decoder, value: Any) -> tuple[Any, ...]:
    _expect(isinstance(value, list), "a list", value)
    items: list[Any] = []
    try:
        for element in value:
            items.append(item(element))
    except _MismatchError as error:
        error.path.append(f"[{len(items)}]")
        raise
    return tuple(items)


def _object(item: _Decoder, value: Any) -> dict[str, Any]:
    _expect(isinstance(value, dict), "an object", value)
    return _items(value, dict.fromkeys(value, item))


def _fields_decoder(kind: type) -> _Decoder:
    # Found at the first value: a field may be of a kind that is declared further below.
    @functools.cache
    def fields() -> dict[str, _Decoder]:
        return {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}

    optional = {field.name for field in dataclasses.fields(kind) if field.metadata == LEFT_OUT}

    def decode(value: Any) -> Any:
        _expect(isinstance(value, dict), "an object", value)
        known = fields()
        unknown, missing = sorted(value.keys() - known.keys()), sorted(known.keys() - value.keys() - optional)
        if unknown or missing:
            raise _MismatchError(f"unknown field {unknown[0]!r}" if unknown else f"the field {missing[0]!r} is missing")
        present = known if len(value) == len(known) else {name: known[name] for name in value}
        return kind(**_items(value, present))

    return decode


def _items(value: dict[str, Any], decoders: dict[str, _Decoder]) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    name = ""
    try:
        for name, decode in decoders.items():
            decoded[name] = decode(value[name])
    except _MismatchError as error:
        error.path.append(f".{name}")
        raise
    return decoded


def _expect(condition: bool, wanted: str, value: Any) -> None:
    if not condition:
        raise _unexpected(wanted, value)


def _unexpected(wanted: str, value: Any) -> _MismatchError:
    return _MismatchError(f"expected {wanted}, found {repr(value)[:80]}")
