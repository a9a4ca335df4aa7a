"""Rows of a table that repeat for each layer or expert, shown as one row, and tables that fit a screen."""

import re
from collections.abc import Sequence
from itertools import pairwise

from llmc.cli.table import FittingTable
from llmc.plural import counted

# The number of a layer or an expert: a whole part of a dotted or underlined name.
_INDEX = re.compile(r"(?<=[._])\d+(?=[._]|$)")
# Measured values, which differ between layers of the same kind: a fraction, a percentage.
_MEASURED = re.compile(r"\d+\.\d+|\d+(?=%)")
# Rows that stay on a screen with the tables around them.
SCREEN = 20
# A name with more runs of numbers than this shows only the first and the last run.
_RUNS = 3


def add_rows(
    table: FittingTable, rows: Sequence[Sequence[str]], *, everything: bool, most: int = SCREEN, flag: str = "--all"
) -> None:
    """Add rows to a table, the first cell of each being a name.

    Rows whose names differ only in numbers, and whose other cells differ only in measured figures, become one row with
    ranges. The caption states the number of hidden rows.

    Args:
        table: Where they go.
        rows: Their cells.
        everything: Whether to show every row unfolded.
        most: Maximum number of rows to show.
        flag: The option that shows all rows.
    """
    folded = [tuple(row) for row in rows] if everything else fold(rows)
    shown = folded if everything else folded[:most]
    for row in shown:
        table.add_row(*row)
    left = len(folded) - len(shown)
    if left:
        table.caption = f"{counted(left, 'more row')}, and each of {counted(len(rows), 'row')}: {flag}"
    elif len(folded) < len(rows):
        table.caption = f"{counted(len(rows), 'row')} with repeated ones folded; each: {flag}"


def fold(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The rows in order, with repeated rows folded into the first of them."""
    groups: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in rows:
        key = (_INDEX.sub("*", row[0]), *(_MEASURED.sub("~", cell) for cell in row[1:]))
        groups.setdefault(key, []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    if len(rows) == 1:
        return tuple(rows[0])
    names = [row[0] for row in rows]
    numbers = [sorted({int(number) for number in column}) for column in zip(*map(_INDEX.findall, names), strict=True)]
    spans = iter([_span(number) for number in numbers])
    name = _INDEX.sub(lambda _: next(spans), names[0])
    cells = (_range([row[i] for row in rows]) for i in range(1, len(rows[0])))
    return (f"{name} (×{len(rows)})", *cells)


def _span(numbers: Sequence[int]) -> str:
    """`0-3,5` for 0, 1, 2, 3, 5."""
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    if len(starts) > _RUNS:
        return f"{numbers[0]}…{numbers[-1]}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _range(cells: Sequence[str]) -> str:
    """The cell of a folded row, with the minimum and maximum of each figure that differs."""
    ranges = []
    for figures in zip(*map(_MEASURED.findall, cells), strict=True):
        least, largest = min(figures, key=float), max(figures, key=float)
        ranges.append(least if least == largest else f"{least}-{largest}")
    spans = iter(ranges)
    return _MEASURED.sub(lambda _: next(spans), cells[0])
