"""GGUF metadata, asked for by key and kind: what is missing or of another kind is a CheckpointError that says so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError

Scalar = int | float | bool | str
Value = Scalar | tuple[Any, ...]
_MOST_WHOLE = 1 << 40


@dataclass(frozen=True)
class Metadata:
    """The metadata of a GGUF file. values: by key. at: the file. prefix: Prepended to each key that is read, such as
    `llama.`."""

    values: Mapping[str, Value]
    at: Path
    prefix: str = ""

    def of(self, prefix: str) -> "Metadata":
        """This metadata, with `prefix` before each key that is read."""
        return Metadata(self.values, self.at, prefix)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.values

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least zero; a list with a number per layer must have equal numbers."""
        value = self._found(key, default)
        if isinstance(value, tuple) and value and all(element == value[0] for element in value):
            value = value[0]
        if isinstance(value, tuple):
            raise self.error(key, value, "the same number for every layer")
        if type(value) is not int or not 0 <= value <= _MOST_WHOLE:
            raise self.error(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A key's value, a finite number. Raises CheckpointError if it is not one."""
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._found(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._found(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A key's value, an array of texts. Raises CheckpointError if it is not one."""
        value = self._found(key, None)
        if not isinstance(value, tuple) or not all(isinstance(element, str) for element in value):
            raise self.error(key, value, "texts")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A key's value, an array of finite numbers. Raises CheckpointError if it is not one."""
        value = self._found(key, None)
        if not isinstance(value, tuple) or not all(
            isinstance(element, int | float) and math.isfinite(element) for element in value
        ):
            raise self.error(key, value, "numbers")
        return value

    def error(self, key: str, value: object, expected: str) -> CheckpointError:
        """The error for a key whose value is not the expected one."""
        return CheckpointError(
            f"metadata {self.prefix}{key} is {value!r:.60}, not {expected}", at=self.at, fix="convert the model again"
        )

    def _found(self, key: str, default: Scalar | None) -> Value:
        value = self.values.get(self.prefix + key, default)
        if value is None:
            raise CheckpointError(f"the file has no metadata {self.prefix}{key}", at=self.at, fix="convert it again")
        return value
