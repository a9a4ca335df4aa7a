"""Quantization on the command line: the options that several verbs share, and the table of what was done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

if TYPE_CHECKING:
    from llmc.quantized_weight import QuantizedWeight

Quantize = Annotated[
    list[str] | None,
    typer.Option(help="scheme, such as int4-gptq:g64, or PATTERN=SCHEME for some weights (repeatable, or commas)"),
]
KvCache = Annotated[str, typer.Option(help="auto, or codes: int8, int4, fp8")]
Calibration = Annotated[Path | None, typer.Option(help="text or token file for methods that look at data")]
CalibrationSequences = Annotated[int, typer.Option(help="sequences taken from it")]
CalibrationLength = Annotated[int, typer.Option(help="tokens of each")]


def quantization_options(
    quantize: list[str] | None, kv_cache: str, calibration: Path | None, sequences: int, length: int
) -> dict[str, Any]:
    """What was given on the command line, by the names of BuildOptions."""
    return {
        "quantize": ",".join(quantize or ()),
        "kv_cache": kv_cache,
        "calibration": None if calibration is None else str(calibration),
        "calibration_sequences": sequences,
        "calibration_length": length,
    }


def quantization_table(weights: Sequence[QuantizedWeight]) -> Table:
    """Scheme, bits and error of each weight; reasons where mixed precision chose."""
    table = Table(title=f"quantized weights: {mean_bits(weights):.3f} bits on average", title_justify="left")
    table.add_column("weight", overflow="fold")
    table.add_column("scheme")
    table.add_column("bits", justify="right")
    on_output = any(weight.is_output_error for weight in weights)
    table.add_column("output error" if on_output else "weight error", justify="right")
    has_reasons = any(weight.reason for weight in weights)
    if has_reasons:
        table.add_column("why")
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
