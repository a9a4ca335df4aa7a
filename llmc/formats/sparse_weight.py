"""The record of a weight with zeros, for the report of a build and `llmc inspect`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SparseWeight:
    """One weight with zeros.

    module: its name in the checkpoint, or lm_head. tensor: the checkpoint's tensor. scheme: as spelled, or how the
    checkpoint has it. zeros: the share of elements that are zero. error: root mean square error over the root mean
    square, of the product's output on calibration text if is_output_error, else of the weight; None if the zeros
    came with the checkpoint. bits: a weight as it is stored, masks and scales included; None until it is decided.
    dense_bits: what it takes with its zeros stored. reason: why the zeros are stored, None if they are not.
    """

    module: str
    tensor: str
    scheme: str
    rows: int
    columns: int
    zeros: float
    error: float | None = None
    is_output_error: bool = False
    bits: float | None = None
    dense_bits: float | None = None
    reason: str | None = None

    @property
    def gain(self) -> float | None:
        """The factor by which decoding reads the weight faster than with its zeros."""
        return None if self.bits is None or self.dense_bits is None else self.dense_bits / self.bits


def sparse_bits(element_bits: float, zeros: float) -> float:
    """Bits per weight with masks: those of the nonzero elements, and one per element."""
    return element_bits * (1.0 - zeros) + 1.0
