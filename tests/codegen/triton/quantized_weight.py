"""Random quantized weights of every format, as the ops take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.codegen.triton.claimed import Claimed

_OPS = torch.ops.llmc


@dataclass(frozen=True)
class QuantizedWeight:
    """codes, scales and zeros as in llmc/ops/weight_codes.py."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str

    def claimed(self) -> Claimed:
        """As a product's weight, whose kernel decodes it."""
        return Claimed(_OPS.dequantize.default, (self.codes, self.scales, self.zeros, self.format, torch.float32))


def quantized_weight(
    format: str, out: int, columns: int, group: int | None, *, asymmetric: bool = False
) -> QuantizedWeight:
    """Rounded from normal numbers of a seed. group: None for a scale a row."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(out * columns))
    dtype = torch.float32 if group is None else torch.bfloat16
    scales = _OPS.weight_scales(weight, format, group or columns, not asymmetric, 1, dtype)
    zeros = _OPS.weight_zeros(weight, scales, format, 1) if asymmetric else None
    return QuantizedWeight(_OPS.weight_codes(weight, scales, zeros, format), scales, zeros, format)
