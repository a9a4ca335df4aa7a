"""Expression text is evaluated as sympy would, and nothing outside the little grammar is."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import EngineFormatError
from llmc.graph.op_record import A, C, L, R, T
from llmc.prediction.cost_expression import evaluate_expression

VALUES = {"T": 7, "L": 3, "R": 2, "C": 40, "A": 90}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("2*T + 3*L - 1", 22),
        ("-T + 10", 3),
        ("T*(L + 2*(R - 1))", 35),
        ("64*Min(C, 4*R) + 1.5e1", 527),
        ("Min(T, L, R)", 2),
    ],
)
def test_the_value_of_an_expression(text: str, value: float) -> None:
    assert evaluate_expression(text, VALUES) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it ends too early"),
        ("2*", "it ends too early"),
        ("T T", "unexpected 'T'"),
        ("T**2", "unexpected"),
        ("2*+T", "unexpected '+'"),
        ("X + 1", "unknown symbol 'X'"),
        ("__import__('os')", "unexpected"),
        ("T.real", "unexpected '.real'"),
        ("(T", "a parenthesis is not closed"),
        ("Min(T", "a parenthesis is not closed"),
        ("Min", "unknown symbol 'Min'"),
        ("(" * 101 + "T" + ")" * 101, "more than 100 parentheses"),
    ],
)
def test_refuses_what_is_no_expression(text: str, why: str) -> None:
    with pytest.raises(EngineFormatError) as caught:
        evaluate_expression(text, VALUES)
    assert why in caught.value.problem


_terms = st.tuples(
    st.integers(-9999, 9999), st.sampled_from([T, L, C, A, R, sympy.Min(C, 8 * R), sympy.Min(A, 4 * T), T * L])
)


@settings(max_examples=50)
@given(st.lists(_terms, max_size=6), st.integers(-99, 99))
def test_agrees_with_sympy(terms: list[tuple[int, sympy.Expr]], constant: int) -> None:
    expression = sympy.expand(sum((factor * term for factor, term in terms), sympy.Integer(constant)))
    named = {symbol: VALUES[symbol.name] for symbol in (T, L, C, A, R)}
    assert evaluate_expression(str(expression), VALUES) == float(expression.subs(named))
