"""Tables that fit: on a narrow terminal columns are left out, the least important first, and no word is broken."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

Cell = str | Text

# Between two columns, and outside them: a border and a space on each side.
_BETWEEN, _OUTSIDE = 3, 4
# Text that takes several lines is not made narrower than this while another column can be left out.
_LEAST_TEXT = 24
# The width for a file or a pipe, in effect unlimited.
_UNBOUNDED = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table. rank: 0 for a column that is always shown. The column with the highest rank is dropped
    first, and among equals the rightmost column.

    wraps: text that may take several lines, broken between words.
    """

    name: str
    rank: int = 0
    right: bool = False
    wraps: bool = False
    style: str = ""


@dataclass
class FittingTable:
    """Rows under columns, as wide as the console allows. Cells are plain text: a str is never read as markup."""

    title: str
    columns: Sequence[Column]
    has_header: bool = True
    caption: str | None = None
    _rows: list[tuple[list[Text], str]] = field(default_factory=list)
    _sections: set[int] = field(default_factory=set)

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row, with a cell for each column."""
        assert len(cells) == len(self.columns), (cells, self.columns)
        self._rows.append(([cell if isinstance(cell, Text) else Text(cell) for cell in cells], style))

    def add_section(self) -> None:
        """Draw a line under the rows added until now."""
        self._sections.add(len(self._rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        kept = self._kept(options.max_width)
        yield self._table(kept, options.max_width)
        left_out = [column.name for i, column in enumerate(self.columns) if i not in kept]
        if left_out:
            yield Text(f"left out at {options.max_width} columns: {', '.join(left_out)}", style="dim italic")
        if self.caption is not None:
            yield Text(self.caption, style="dim italic")

    def _kept(self, width: int) -> list[int]:
        """The columns that are shown, as indices."""
        kept = list(range(len(self.columns)))
        while _total(self._narrowest(i) for i in kept) > width:
            last = max(kept, key=lambda i: (self.columns[i].rank, i))
            if self.columns[last].rank == 0:
                break  # The remaining columns are folded, because no further column may be dropped.
            kept.remove(last)
        return kept

    def _table(self, kept: Sequence[int], width: int) -> Table:
        table = Table(show_header=self.has_header)
        for i, granted in zip(kept, self._widths(kept, width), strict=True):
            column = self.columns[i]
            table.add_column(column.name, style=column.style, width=granted, overflow="fold")
            table.columns[-1].justify = "right" if column.right else "left"
        for number, (cells, style) in enumerate(self._rows):
            shown: list[RenderableType] = [cells[i] for i in kept]
            table.add_row(*shown, style=style, end_section=number in self._sections)
        return table

    def _widths(self, kept: Sequence[int], width: int) -> list[int]:
        """The width of each column: its minimum, plus, for text columns, a share of the remaining width in proportion
        to their text."""
        granted = {i: self._narrowest(i) for i in kept}
        more = {i: self._natural(i) - granted[i] for i in kept}
        spare = width - _total(granted.values())
        if spare < 0:
            widest = max(kept, key=lambda i: granted[i])
            granted[widest] = max(1, granted[widest] + spare)
        share = min(1.0, max(0, spare) / max(1, sum(more.values())))
        return [granted[i] + int(more[i] * share) for i in kept]

    def _natural(self, column: int) -> int:
        """The width of the longest line."""
        return max((text.cell_len for text in self._texts(column)), default=0)

    def _narrowest(self, column: int) -> int:
        """Return the least width at which no word is broken."""
        natural = self._natural(column)
        if not self.columns[column].wraps:
            return natural
        words = (Text(word).cell_len for text in self._texts(column) for word in text.plain.split())
        return max(min(natural, _LEAST_TEXT), *words, 0)

    def _texts(self, column: int) -> Iterable[Text]:
        header = (Text(self.columns[column].name),) if self.has_header else ()
        return (*header, *(cells[column] for cells, _ in self._rows))


def numeric(*names: str | tuple[str, int]) -> tuple[Column, ...]:
    """Columns of numbers. A column that may be dropped is given with its rank."""
    ranked = ((name, 0) if isinstance(name, str) else name for name in names)
    return tuple(Column(name, rank, right=True) for name, rank in ranked)


def facts(title: str, *, right: bool = False) -> FittingTable:
    """A table of names and values. right: Whether values are right-aligned, as for numbers."""
    return FittingTable(title, (Column("", style="bold"), Column("", wraps=True, right=right)), has_header=False)


def standard_output() -> Console:
    """Return a console on standard output. A file or a pipe is as wide as its widest table, unless COLUMNS is set."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if bounded else _UNBOUNDED, highlight=False, emoji=False)


def _total(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + _BETWEEN * (len(listed) - 1) + _OUTSIDE
