"""Evaluate a cost expression read from an engine: sums, products and Min of numbers and symbols, and nothing else.

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = number | symbol | "Min" "(" sum ("," sum)* ")" | "(" sum ")"

This is what sympy prints for the expressions of graph/cost.py. The text is never handed to eval or to sympy.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod

from llmc.errors import EngineFormatError

_MAX_PARENTHESES = 100
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[A-Za-z_]\w*|[-+*(),])")
_Values = Mapping[str, float]
Expression = Callable[[_Values], float]


def evaluate_expression(text: str, values: _Values) -> float:
    """The value of the expression for the symbols' values; raises EngineFormatError outside the grammar."""
    return parse_expression(text)(values)


# Layers are alike, so a program has few different ones, and predictions ask for each of them again and again.
@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """A function of the symbols' values. Raises EngineFormatError outside the grammar, as the function does for symbols
    without a value."""
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
    expression, rest = _sum(tokens, text)
    if rest:
        raise _malformed(text, f"unexpected {rest[0]!r}")
    return expression


def _sum(tokens: list[str], text: str) -> tuple[Expression, list[str]]:
    terms: list[tuple[int, float, list[Expression]]] = []
    sign = 1
    if tokens[:1] == ["-"]:
        sign, tokens = -1, tokens[1:]
    while True:
        number, factors = 1.0, list[Expression]()
        while True:
            factor, tokens = _factor(tokens, text)
            if isinstance(factor, float):
                number *= factor
            else:
                factors.append(factor)
            if tokens[:1] != ["*"]:
                break
            tokens = tokens[1:]
        terms.append((sign, number, factors))
        if not tokens or tokens[0] not in "+-":
            break
        sign, tokens = (1 if tokens[0] == "+" else -1), tokens[1:]
    constant = sum(sign * number for sign, number, factors in terms if not factors)
    varying = [(sign * number, factors) for sign, number, factors in terms if factors]

    def value(values: _Values) -> float:
        return constant + sum([number * prod([term(values) for term in factors]) for number, factors in varying])

    return value, tokens


def _factor(tokens: list[str], text: str) -> tuple[float | Expression, list[str]]:
    if not tokens:
        raise _malformed(text, "it ends too early")
    first, rest = tokens[0], tokens[1:]
    if first[0].isdigit():
        return float(first), rest
    if first == "(" or (first == "Min" and rest[:1] == ["("]):
        return _least(rest if first == "(" else rest[1:], text)
    if not (first[0].isalpha() or first[0] == "_"):
        raise _malformed(text, f"unexpected {first!r}")

    def symbol(values: _Values) -> float:
        if first not in values:
            raise _malformed(text, f"unknown symbol {first!r}")
        return values[first]

    return symbol, rest


def _least(tokens: list[str], text: str) -> tuple[Expression, list[str]]:
    """Parse the text after an opening parenthesis: one sum, or the minimum of several."""
    terms: list[Expression] = []
    while True:
        term, tokens = _sum(tokens, text)
        terms.append(term)
        if tokens[:1] != [","]:
            break
        tokens = tokens[1:]
    if tokens[:1] != [")"]:
        raise _malformed(text, "a parenthesis is not closed")
    return lambda values: min([term(values) for term in terms]), tokens[1:]


def _malformed(text: str, why: str) -> EngineFormatError:
    return EngineFormatError(
        f"cost expression cannot be read: {why}", at=repr(text[:200]), fix="rebuild the engine with this llmc"
    )
