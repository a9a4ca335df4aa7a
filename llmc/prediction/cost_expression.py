"""Evaluate a cost expression read from an engine: sums, products and Min of numbers and symbols, and nothing else.

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = number | symbol | "Min" "(" sum ("," sum)* ")" | "(" sum ")"

This is what sympy prints for the expressions of graph/cost.py. The text is never handed to eval or to sympy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from llmc.errors import EngineFormatError

_MAX_PARENTHESES = 100
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[A-Za-z_]\w*|[-+*(),])")


def evaluate_expression(text: str, values: Mapping[str, float]) -> float:
    """The value of the expression for the symbols' values; raises EngineFormatError outside the grammar."""
    if text.count("(") > _MAX_PARENTHESES:
        raise _malformed(text, f"more than {_MAX_PARENTHESES} parentheses")
    tokens: list[str] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise _malformed(text, f"unexpected {text[position:].strip()[:20]!r}")
        tokens.append(match[1])
        position = match.end()
    value, rest = _sum(tokens, text, values)
    if rest:
        raise _malformed(text, f"unexpected {rest[0]!r}")
    return value


def _sum(tokens: list[str], text: str, values: Mapping[str, float]) -> tuple[float, list[str]]:
    total, sign = 0.0, 1
    if tokens[:1] == ["-"]:
        sign, tokens = -1, tokens[1:]
    while True:
        factors: list[float] = []
        while True:
            factor, tokens = _factor(tokens, text, values)
            factors.append(factor)
            if tokens[:1] != ["*"]:
                break
            tokens = tokens[1:]
        total += sign * prod(factors)
        if not tokens or tokens[0] not in "+-":
            return total, tokens
        sign, tokens = (1 if tokens[0] == "+" else -1), tokens[1:]


def _factor(tokens: list[str], text: str, values: Mapping[str, float]) -> tuple[float, list[str]]:
    if not tokens:
        raise _malformed(text, "it ends too early")
    first, rest = tokens[0], tokens[1:]
    if first[0].isdigit():
        return float(first), rest
    if first == "(" or (first == "Min" and rest[:1] == ["("]):
        terms: list[float] = []
        rest = rest if first == "(" else rest[1:]
        while True:
            term, rest = _sum(rest, text, values)
            terms.append(term)
            if first == "(" or rest[:1] != [","]:
                break
            rest = rest[1:]
        if rest[:1] != [")"]:
            raise _malformed(text, "a parenthesis is not closed")
        return min(terms), rest[1:]
    if not (first[0].isalpha() or first[0] == "_"):
        raise _malformed(text, f"unexpected {first!r}")
    if first not in values:
        raise _malformed(text, f"unknown symbol {first!r}")
    return values[first], rest


def _malformed(text: str, why: str) -> EngineFormatError:
    return EngineFormatError(
        f"cost expression cannot be read: {why}", at=repr(text[:200]), fix="rebuild the engine with this llmc"
    )
