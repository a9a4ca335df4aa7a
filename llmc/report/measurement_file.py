"""Read back what one verb measured and wrote as JSON, for another to show."""

import json
from pathlib import Path
from typing import Any, TypeVar

from llmc.errors import EngineFormatError
from llmc.files.typed_json import from_json

T = TypeVar("T")


def read_measurement(kind: type[T], path: Path, *, name: str, version: int, fix: str) -> T:
    """A `kind` of that version. name, fix: for the EngineFormatError that says what is wrong with the file."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineFormatError(f"the {name} cannot be read: {error.strerror}", at=path, fix=fix) from None
    except ValueError as error:
        raise EngineFormatError(f"the {name} is not JSON: {error}", at=path, fix=fix) from None
    if not isinstance(content, dict) or content.get("version") != version:
        raise EngineFormatError(f"this is not a {name} of version {version}", at=path, fix=fix)
    return from_json(kind, content, str(path))
