"""How a kernel table sees the node that it is asked to launch: the node's arguments as operand texts and numbers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import fx

from llmc.program import Layout, Limits, RowCount

# An operand's text (llmc.program.Operand), a count (T, L, R or max_blocks), another word, or a number.
Argument = str | int | float | bool | None


class Call(Protocol):
    """A node to be called: how its arguments become text. `name` is the argument's in the op's schema."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor argument, without its row axis."""
        ...

    def count(self, name: str) -> str | int:
        """How many rows a tensor argument has."""
        ...

    def plain(self, name: str) -> Any:
        """An argument that is no tensor."""
        ...

    def rows(self, name: str) -> str | None:
        """A tensor argument as rows (pointer and row stride); None if the op is called without it."""
        ...

    def result(self, index: int = 0) -> str:
        """Where to write a result, as rows."""
        ...

    def vector(self, name: str) -> str | None:
        """A weight as an fp32 vector, or a computed fp32 or int32 tensor as a contiguous one."""
        ...

    def weight(self, name: str, layout: Layout) -> str:
        """A weight in a layout."""
        ...

    def code_panels(self, layout: Layout) -> str:
        """A quantized weight, the arguments codes, scales, zeros and format, in a layout."""
        ...

    def code_rows(self) -> tuple[str, str, str | None]:
        """The same arguments, with row-major codes (CODE_ROWS or CODE_PAIR_ROWS), scales and zeros each by itself."""
        ...

    def table(self, name: str) -> Layout:
        """The layout in which an embedding's weight is stored: PANELS if a product reads the same weight."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor argument."""
        ...

    def workspace(self, name: str, rows: RowCount, columns: int, dtype: torch.dtype) -> str:
        """Memory of rows × columns elements for what passes between the node's own launches, as rows."""
        ...

    def cache(self, name: str) -> str:
        """A cache pointer."""
        ...

    def block_size(self) -> int:
        """Positions in a block of the cache."""
        ...

    def limits(self) -> Limits:
        """What a step may hold at most, for memory whose size no row count says."""
        ...


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by schema name; defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
