"""The table of what was taken out of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.cli.table import Column, FittingTable

if TYPE_CHECKING:
    from llmc.formats.pruned_part import PrunedPart


def pruning_table(parts: Sequence[PrunedPart]) -> FittingTable:
    """Of each part what went, what its output lost, and the parameters left."""
    before, left = (sum(each) for each in zip(*((p.parameters, p.parameters_left) for p in parts), strict=True))
    columns = (
        Column("pruned"),
        Column("taken out", right=True),
        Column("output error", rank=1, right=True),
        Column("parameters", rank=2, right=True),
        Column("left", right=True),
    )
    table = FittingTable(f"pruned parts: {left / before:.1%} of {before / 1e6:.2f} M parameters left", columns)
    for part in parts:
        taken = "the layer" if part.kind == "layer" else f"{len(part.removed)} of {part.of} {part.kind}"
        share = f"{part.parameters_left / part.parameters:.1%}" if part.parameters else ""
        table.add_row(part.module, taken, f"{part.error:.2%}", f"{part.parameters:,}", share)
    return table
