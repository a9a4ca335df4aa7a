"""Paths that a caller of the API passes."""

from os import PathLike
from pathlib import Path
from typing import Any

from llmc.errors import OptionError


def path_argument(name: str, value: Any) -> Path:
    """`value` as a Path; OptionError if it is neither a string nor path-like."""
    if not isinstance(value, str | PathLike):
        raise OptionError(
            f"{name} cannot be {value!r:.80} ({type(value).__name__})", at=name, fix="give a path: a str or a Path"
        )
    return Path(value)
