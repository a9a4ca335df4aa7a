"""Launch grids: what the expressions mean, and that nothing else is read."""

from __future__ import annotations

import pytest

from llmc.errors import EngineFormatError
from llmc.program.launch_grid import evaluate_grid

COUNTS = {"T": 65, "L": 3, "R": 2, "max_blocks": 7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("T", 65),
        ("8", 8),
        ("cdiv(T, 64) * 4", 8),
        ("cdiv(T, 16) + R - 1", 6),
        ("min(T, 10) * max(L, R)", 30),
        ("(T - R) * (L + 1)", 252),
        ("cdiv(T * 32, 16)", 130),
    ],
)
def test_the_value_of_a_grid(text: str, value: int) -> None:
    assert evaluate_grid(text, COUNTS) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        ("T +", "ends too early"),
        ("T T", "unexpected 'T'"),
        ("x", "unexpected 'x'"),
        ("T / 2", "unexpected '/ 2'"),
        ("T ** 2", "unexpected '*'"),
        ("cdiv(T)", "where ',' should"),
        ("cdiv(T, R - 2)", "cdiv by 0"),
        ("(T", "ends too early"),
        ("__import__('os')", "unexpected"),
        ("(" * 300, "longer than"),
    ],
)
def test_what_is_outside_the_grammar(text: str, why: str) -> None:
    with pytest.raises(EngineFormatError) as caught:
        evaluate_grid(text, COUNTS)
    assert why in str(caught.value)
