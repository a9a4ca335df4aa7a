"""The table of what became of an engine's weights with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.cli.table import Column, FittingTable

if TYPE_CHECKING:
    from llmc.formats.sparse_weight import SparseWeight


def sparsity_table(weights: Sequence[SparseWeight]) -> FittingTable:
    """Share of zeros, bits, error and predicted gain of each weight; why one is dense."""
    on_output = any(weight.is_output_error for weight in weights)
    has_reasons = any(weight.reason for weight in weights)
    columns = (
        Column("weight"),
        Column("zeros by", rank=3),
        Column("zeros", right=True),
        Column("bits", right=True),
        Column("gain", rank=2, right=True),
        Column("output error" if on_output else "weight error", rank=1, right=True),
        *((Column("why dense", rank=4, wraps=True),) if has_reasons else ()),
    )
    elements = sum(weight.rows * weight.columns for weight in weights)
    zeros = sum(weight.zeros * weight.rows * weight.columns for weight in weights) / elements
    table = FittingTable(f"sparse weights: {zeros:.1%} zeros on average; gain of decoding by its bytes", columns)
    for weight in weights:
        kind = "" if weight.is_output_error == on_output else " (weight)"
        error = "as stored" if weight.error is None else f"{weight.error:.2%}{kind}"
        bits = "dense" if weight.bits is None else f"{weight.bits:.2f}"
        gain = "" if weight.gain is None else f"{weight.gain:.2f}x"
        row = (weight.module, weight.scheme, f"{weight.zeros:.1%}", bits, gain, error)
        table.add_row(*row, *((weight.reason or "",) if has_reasons else ()))
    return table
