"""Tables of a build's changes to the weights: codes, zeros, and pruned parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.cli.repeated_rows import add_rows
from llmc.cli.table import Column, FittingTable, numeric

if TYPE_CHECKING:
    from llmc.formats.pruned_part import PrunedPart
    from llmc.formats.quantized_weight import QuantizedWeight
    from llmc.formats.sparse_weight import SparseWeight


def quantization_table(weights: Sequence[QuantizedWeight], *, everything: bool = False) -> FittingTable:
    """Return a table of the scheme, bits and error of each weight, with the reasons of mixed precision."""
    columns = (Column("weight"), Column("scheme", rank=2), *numeric("bits"))
    title = f"quantized weights: {mean_bits(weights):.3f} bits on average"
    rows = [(weight.module, weight.scheme, f"{weight.bits:.3f}") for weight in weights]
    return _with_errors(title, columns, Column("why", rank=3, wraps=True), weights, rows, everything)


def mean_bits(weights: Sequence[QuantizedWeight]) -> float:
    """Mean bits per weight, scales included, over all quantized weights."""
    elements = sum(weight.rows * weight.columns for weight in weights)
    return sum(weight.bits * weight.rows * weight.columns for weight in weights) / elements


def sparsity_table(weights: Sequence[SparseWeight], *, everything: bool = False) -> FittingTable:
    """Return a table of the share of zeros, bits, error and predicted gain of each weight, with the reason for a dense
    one."""
    columns = (Column("weight"), Column("zeros by", rank=3), *numeric("zeros", "bits", ("gain", 2)))
    elements = sum(weight.rows * weight.columns for weight in weights)
    zeros = sum(weight.zeros * weight.rows * weight.columns for weight in weights) / elements
    title = f"sparse weights: {zeros:.1%} zeros on average; gain of decoding by its bytes"
    rows = []
    for weight in weights:
        bits = "dense" if weight.bits is None else f"{weight.bits:.2f}"
        gain = "" if weight.gain is None else f"{weight.gain:.2f}x"
        rows.append((weight.module, weight.scheme, f"{weight.zeros:.1%}", bits, gain))
    return _with_errors(title, columns, Column("why dense", rank=4, wraps=True), weights, rows, everything)


def pruning_table(parts: Sequence[PrunedPart], *, everything: bool = False) -> FittingTable:
    """Return a table of pruned parts: removed units, loss of the output, and remaining parameters."""
    before, left = (sum(terms) for terms in zip(*((p.parameters, p.parameters_left) for p in parts), strict=True))
    columns = (Column("pruned"), *numeric("taken out", ("output error", 1), ("parameters", 2), "left"))
    table = FittingTable(f"pruned parts: {left / before:.1%} of {before / 1e6:.2f} M parameters left", columns)
    rows = []
    for part in parts:
        removed = "the layer" if part.kind == "layer" else f"{len(part.removed)} of {part.of} {part.kind}"
        if part.kind == "values":
            removed = f"{len(part.removed)} of {part.of} value channels, {1 - part.error**2:.2%} of their energy stays"
        share = f"{part.parameters_left / part.parameters:.1%}" if part.parameters else ""
        rows.append((part.module, removed, f"{part.error:.2%}", f"{part.parameters:,}", share))
    add_rows(table, rows, everything=everything)
    return table


def _with_errors(
    title: str,
    columns: Sequence[Column],
    why: Column,
    weights: Sequence[QuantizedWeight | SparseWeight],
    rows: Sequence[tuple[str, ...]],
    everything: bool,
) -> FittingTable:
    """The rows with each weight's error, and the reason for its storage where any has one."""
    on_output = any(weight.is_output_error for weight in weights)
    has_reasons = any(weight.reason for weight in weights)
    error = numeric(("output error" if on_output else "weight error", 1))
    table = FittingTable(title, (*columns, *error, *((why,) if has_reasons else ())))
    whole = [
        (*row, _error(weight, on_output), *((weight.reason or "",) if has_reasons else ()))
        for weight, row in zip(weights, rows, strict=True)
    ]
    add_rows(table, whole, everything=everything)
    return table


def _error(weight: QuantizedWeight | SparseWeight, on_output: bool) -> str:
    """on_output: Whether the column has the errors of outputs."""
    kind = "" if weight.is_output_error == on_output else " (weight)"
    return "as stored" if weight.error is None else f"{weight.error:.2%}{kind}"
