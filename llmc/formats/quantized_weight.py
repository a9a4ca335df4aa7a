"""The record of a quantized weight, for the report of a build and `llmc inspect`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizedWeight:
    """The outcome of quantization for one weight.

    module: its name in the checkpoint. scheme: as spelled. bits: a weight, scales included. error: root mean square
    error over the root mean square, of the product's output on calibration text if is_output_error, else of the
    weight; None if codes came with the checkpoint. reason: why mixed precision chose the scheme.
    """

    module: str
    scheme: str
    rows: int
    columns: int
    bits: float
    error: float | None = None
    is_output_error: bool = False
    reason: str | None = None
