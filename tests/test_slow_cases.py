"""The list of dear tests names tests that are there: a line that names none would leave its test among the quick."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.parsed_source import parsed
from tests.slow_cases import slow_cases

ROOT = Path(__file__).parent.parent


def test_each_line_names_a_test() -> None:
    """Not each case: some are of one kind of processor."""
    named = {line.partition("[")[0] for line in slow_cases()}
    assert len(named) > 100
    gone = []
    for name in sorted(named):
        file, _, function = name.partition("::")
        there = (ROOT / file).exists() and {n.name for n in parsed(ROOT / file).body if isinstance(n, ast.FunctionDef)}
        if not there or function not in there:
            gone.append(name)
    assert gone == []
