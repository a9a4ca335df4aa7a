"""What stands in manifest.json and program.json: whoever changes it gives the format another version."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator

from llmc.engine_format import FORMAT_VERSION, Manifest
from llmc.program import Program


def test_another_content_is_another_version(golden: Callable[[str, str], None]) -> None:
    """Where this fails, update the text; and raise FORMAT_VERSION if engines of it may have left this repository: they
    are then refused by their version, with what to do."""
    records = sorted(set(_records(Manifest)) | set(_records(Program)), key=lambda record: record.__name__)
    golden("engine_format/fields.txt", "\n".join([f"format {FORMAT_VERSION}\n", *map(_described, records)]))


def _described(record: type) -> str:
    hints = typing.get_type_hints(record)
    lines = [f"  {field.name}: {_name(hints[field.name])}\n" for field in dataclasses.fields(record)]
    return f"{record.__name__}\n{''.join(lines)}"


def _name(hint: object) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:typing|llmc)\.(?:\w+\.)*", "", name)


def _records(hint: object) -> Iterator[type]:
    """The dataclasses that a type is made of."""
    for part in typing.get_args(hint):
        yield from _records(part)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from _records(inner)
