"""Evaluate a launch grid's expression read from an engine: whole numbers and counts of a step, and nothing else.

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = number | "T" | "L" | "R" | "max_blocks" | ("cdiv" | "min" | "max") "(" sum "," sum ")" | "(" sum ")"

cdiv(a, b) is a / b rounded up. The text is never handed to eval.
"""

import operator
import re
from collections.abc import Callable, Mapping

from llmc.errors import EngineFormatError

# The value of an expression for a step's counts.
GridSize = Callable[[Mapping[str, int]], int]
_MAX_LENGTH = 200
_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|[-+*(),])")
_COUNTS = ("T", "L", "R", "max_blocks")


def evaluate_grid(text: str, counts: Mapping[str, int]) -> int:
    """The value of the expression for the counts' values; raises EngineFormatError outside the grammar."""
    return parse_grid(text)(counts)


def parse_grid(text: str) -> GridSize:
    """A function that computes the expression, about 20 times as fast as reading it.

    Raises EngineFormatError outside the grammar; the function does so for a cdiv by less than 1.
    """
    if len(text) > _MAX_LENGTH:
        raise _malformed(text, f"it is longer than {_MAX_LENGTH} characters")
    return _Parser(text).parse()


class _Parser:
    """The tokens of one expression, consumed from the left."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        self._next = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise _malformed(text, f"unexpected {text[position:].strip()[:20]!r}")
            self._tokens.append(match[1])
            position = match.end()

    def parse(self) -> GridSize:
        value = self._sum()
        if self._peek() is not None:
            raise _malformed(self._text, f"unexpected {self._peek()!r}")
        return value

    def _sum(self) -> GridSize:
        total = self._product()
        while self._peek() in ("+", "-"):
            operation = operator.add if self._take() == "+" else operator.sub
            total = _applied(operation, total, self._product())
        return total

    def _product(self) -> GridSize:
        total = self._factor()
        while self._peek() == "*":
            self._take()
            total = _applied(operator.mul, total, self._factor())
        return total

    def _factor(self) -> GridSize:
        token = self._take()
        if token.isdigit():
            number = int(token)
            return lambda counts: number
        if token in _FUNCTIONS or token == "cdiv":
            self._expect("(")
            first = self._sum()
            self._expect(",")
            second = self._sum()
            self._expect(")")
            return _applied(_FUNCTIONS.get(token, self._cdiv), first, second)
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        if token not in _COUNTS:
            raise _malformed(self._text, f"unexpected {token!r}")
        return operator.itemgetter(token)

    def _cdiv(self, dividend: int, divisor: int) -> int:
        if divisor < 1:
            raise _malformed(self._text, f"cdiv by {divisor}")
        return -(-dividend // divisor)

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


_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"min": min, "max": max}


def _applied(function: Callable[[int, int], int], first: GridSize, second: GridSize) -> GridSize:
    return lambda counts: function(first(counts), second(counts))


def _malformed(text: str, why: str) -> EngineFormatError:
    return EngineFormatError(
        f"launch grid cannot be read: {why}", at=repr(text[:_MAX_LENGTH]), fix="rebuild the engine with this llmc"
    )
