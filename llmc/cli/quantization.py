"""The table of what quantization did to an engine's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.cli.table import Column, FittingTable

if TYPE_CHECKING:
    from llmc.formats.quantized_weight import QuantizedWeight


def quantization_table(weights: Sequence[QuantizedWeight]) -> FittingTable:
    """Scheme, bits and error of each weight; reasons where mixed precision chose."""
    on_output = any(weight.is_output_error for weight in weights)
    has_reasons = any(weight.reason for weight in weights)
    columns = (
        Column("weight"),
        Column("scheme", rank=2),
        Column("bits", right=True),
        Column("output error" if on_output else "weight error", rank=1, right=True),
        *((Column("why", rank=3, wraps=True),) if has_reasons else ()),
    )
    table = FittingTable(f"quantized weights: {mean_bits(weights):.3f} bits on average", columns)
    for weight in weights:
        kind = "" if weight.is_output_error == on_output else " (weight)"
        error = "as stored" if weight.error is None else f"{weight.error:.2%}{kind}"
        row = (weight.module, weight.scheme, f"{weight.bits:.3f}", error)
        table.add_row(*row, *((weight.reason or "",) if has_reasons else ()))
    return table


def mean_bits(weights: Sequence[QuantizedWeight]) -> float:
    """Bits a weight, scales included, over all that are quantized."""
    elements = sum(weight.rows * weight.columns for weight in weights)
    return sum(weight.bits * weight.rows * weight.columns for weight in weights) / elements
