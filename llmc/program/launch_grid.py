"""Evaluate a launch grid's expression read from an engine: whole numbers and counts of a step, and nothing else.

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = number | "T" | "L" | "R" | "max_blocks" | ("cdiv" | "min" | "max") "(" sum "," sum ")" | "(" sum ")"

cdiv(a, b) is a / b rounded up. The text is never handed to eval.
"""

import re
from collections.abc import Callable, Mapping

from llmc.errors import EngineFormatError

_MAX_LENGTH = 200
_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|[-+*(),])")


def evaluate_grid(text: str, counts: Mapping[str, int]) -> int:
    """The value of the expression for the counts' values; raises EngineFormatError outside the grammar."""
    if len(text) > _MAX_LENGTH:
        raise _malformed(text, f"it is longer than {_MAX_LENGTH} characters")
    return _Parser(text, counts).parse()


class _Parser:
    """The tokens of one expression, consumed from the left."""

    def __init__(self, text: str, counts: Mapping[str, int]) -> None:
        self._text, self._counts = text, counts
        self._tokens: list[str] = []
        self._next = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise _malformed(text, f"unexpected {text[position:].strip()[:20]!r}")
            self._tokens.append(match[1])
            position = match.end()

    def parse(self) -> int:
        value = self._sum()
        if self._peek() is not None:
            raise _malformed(self._text, f"unexpected {self._peek()!r}")
        return value

    def _sum(self) -> int:
        total = self._product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total += sign * self._product()
        return total

    def _product(self) -> int:
        total = self._factor()
        while self._peek() == "*":
            self._take()
            total *= self._factor()
        return total

    def _factor(self) -> int:
        token = self._take()
        if token.isdigit():
            return int(token)
        if token in _FUNCTIONS:
            self._expect("(")
            first = self._sum()
            self._expect(",")
            second = self._sum()
            self._expect(")")
            if token == "cdiv" and second < 1:
                raise _malformed(self._text, f"cdiv by {second}")
            return _FUNCTIONS[token](first, second)
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        if token not in self._counts:
            raise _malformed(self._text, f"unexpected {token!r}")
        return self._counts[token]

    def _peek(self) -> str | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise _malformed(self._text, "it ends too early")
        self._next += 1
        return token

    def _expect(self, token: str) -> None:
        found = self._take()
        if found != token:
            raise _malformed(self._text, f"{found!r} stands where {token!r} should")


_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


def _malformed(text: str, why: str) -> EngineFormatError:
    return EngineFormatError(
        f"launch grid cannot be read: {why}", at=repr(text[:_MAX_LENGTH]), fix="rebuild the engine with this llmc"
    )
