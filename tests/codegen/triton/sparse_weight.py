"""Random weights without their zeros, as products and lookups take them, and the same with their zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.ops.sparse_weight import is_stored, mask_words
from tests.codegen.triton.claimed import Claimed
from tests.codegen.triton.quantized_weight import quantized_weight
from tests.seeded_normal import seeded_normal

_OPS = torch.ops.llmc


@dataclass(frozen=True)
class SparseRows:
    """dense: elements [out, in] with their zeros, or int8 codes. scales: of codes [out, groups]."""

    dense: Tensor
    scales: Tensor | None = None

    def claimed(self) -> Claimed:
        """As a product's weight, whose kernel puts its elements into their places."""
        kept = is_stored(self.dense)
        parts = self.dense[kept], mask_words(kept)
        if self.scales is None:
            return Claimed(_OPS.sparse_bitmask.default, (*parts, self.dense.shape[1], torch.float32))
        columns = self.dense.shape[1]
        return Claimed(_OPS.sparse_codes.default, (*parts, self.scales, columns, "int8", torch.float32))


def sparse_rows(out: int, columns: int, zeros: float, dtype: torch.dtype = torch.float32) -> SparseRows:
    """Normal numbers of a seed, that share of them zero; a row of zeros among them, and a row without any."""
    dense = seeded_normal(out * columns, out, columns)
    return SparseRows(_with_zeros(dense, zeros).to(dtype))


def sparse_code_rows(out: int, columns: int, zeros: float, group: int | None) -> SparseRows:
    """The same of codes of int8. group: columns that share a scale; None for all of a row."""
    weight = quantized_weight("int8", out, columns, group)
    return SparseRows(_with_zeros(weight.codes, zeros), weight.scales)


def _with_zeros(dense: Tensor, zeros: float) -> Tensor:
    drawn = torch.rand(dense.shape, generator=torch.Generator().manual_seed(len(dense)))
    drawn[0], drawn[-1] = 1.0, 0.0
    return dense.masked_fill(drawn < zeros, 0)
