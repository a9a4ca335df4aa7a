"""Random quantized weights of every format, as the ops take them."""

from __future__ import annotations

import torch

from llmc.formats.code_format import CODE_FORMATS
from llmc.passes.quantization.round_weight import RoundedWeight
from tests.blocked_parts import blocked_parts
from tests.codegen.triton.claimed import Claimed

_OPS = torch.ops.llmc


class QuantizedWeight(RoundedWeight):
    """A weight as the ops take it."""

    def claimed(self) -> Claimed:
        """As a product's weight, whose kernel decodes it."""
        given = (self.codes, self.scales, self.zeros, self.format, torch.float32)
        return Claimed(_OPS.dequantize.default, (*given, self.scale_steps, self.minima, self.minimum_steps))


def quantized_weight(
    format: str, out: int, columns: int, group: int | None, *, asymmetric: bool = False
) -> QuantizedWeight:
    """A weight rounded from seeded normal numbers. group: None for row scales. Blocked formats get random parts."""
    generator = torch.Generator().manual_seed(out * columns)
    if CODE_FORMATS[format].is_blocked:
        parts = blocked_parts(format, out, columns, generator=generator)
        return QuantizedWeight(parts.pop("codes"), parts.pop("scales"), None, format, **parts)
    weight = torch.randn(out, columns, generator=generator)
    dtype = torch.float32 if group is None else torch.bfloat16
    scales = _OPS.weight_scales(weight, format, group or columns, not asymmetric, 1, dtype)
    zeros = _OPS.weight_zeros(weight, scales, format, 1) if asymmetric else None
    return QuantizedWeight(_OPS.weight_codes(weight, scales, zeros, format), scales, zeros, format)


def meta_blocked(format: str, out: int, columns: int) -> QuantizedWeight:
    """Of a blocked format, on the device meta: shapes and dtypes."""
    parts = {
        name: torch.empty(out, part.shape[1], dtype=part.dtype, device="meta")
        for name, part in blocked_parts(format, 1, columns).items()
    }
    return QuantizedWeight(parts.pop("codes"), parts.pop("scales"), None, format, **parts)
