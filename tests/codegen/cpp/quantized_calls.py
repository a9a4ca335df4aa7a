"""Random quantized weights, and the kernels over code panels called with tensors."""

from __future__ import annotations

from ctypes import c_void_p

import torch
from torch import Tensor

from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.formats.code_format import CODE_FORMATS
from llmc.ops.token_codes import round_tokens
from llmc.ops.weight_codes import weight_codes, weight_scales, weight_zeros
from llmc.passes.quantization.round_weight import RoundedWeight
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.blocked_parts import blocked_parts
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows


class QuantizedWeight(RoundedWeight):
    """A weight as the ops take it."""

    @property
    def group(self) -> int:
        """Columns that share a float scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def fields(self) -> dict[str, str | bool]:
        """What the kernels' structs say of its codes."""
        return {"format": self.format, "scale_type": SCALES[self.scales.dtype], "has_zeros": self.zeros is not None}

    def packed(self, *, gated: bool = False) -> Tensor:
        """Its code panels."""
        return pack_codes(self.parts(), self.format, Layout.GATED_CODE_PANELS if gated else Layout.CODE_PANELS)


def quantized(
    out: int,
    channels: int,
    format: str,
    *,
    group: int | None = None,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Random weights of that shape, of magnitude 1 / sqrt(channels). group: None for a scale a row; of blocked formats
    their own."""
    if CODE_FORMATS[format].is_blocked:
        return blocked(out, channels, format, scale_dtype=scale_dtype)
    weight = torch.randn(out, channels) / channels**0.5
    scales = weight_scales(weight, format, group or channels, symmetric, 1, scale_dtype)
    zeros = None if symmetric else weight_zeros(weight, scales, format, 1)
    return QuantizedWeight(weight_codes(weight, scales, zeros, format), scales, zeros, format)


def blocked(out: int, channels: int, format: str, *, scale_dtype: torch.dtype = torch.float16) -> QuantizedWeight:
    """Random parts of a blocked format, each over its whole range."""
    parts = blocked_parts(format, out, channels, scale_dtype=scale_dtype)
    return QuantizedWeight(parts.pop("codes"), parts.pop("scales"), None, format, **parts)


def operands(
    x: Tensor,
    weight: QuantizedWeight,
    x_format: str = "none",
    x_scale: Tensor | None = None,
    x_group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x and the weight as a product's reference reads them: what their codes stand for, not rounded."""
    rounded = x if x_format == "none" else round_tokens(x, x_scale, x_format, torch.float32, x_group)
    return rounded, weight.values()


def call_quantized(
    target: CpuTarget,
    kernel: str,
    x: Tensor,
    weight: QuantizedWeight,
    y: Tensor,
    *,
    x_format: str = "none",
    x_scale: Tensor | None = None,
    x_group: int | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "identity",
    scale: float = 1.0,
    threads: int = 2,
    pool: c_void_p | None = None,
) -> Tensor:
    """Run llmc_quantized_`kernel`_<dtype of x> (linear, gated_linear, lm_head) into y and return y."""
    tokens, channels = x.shape
    packed = weight.packed(gated=kernel == "gated_linear")
    bias = None if bias is None else bias.float()
    values = {
        "tokens": tokens,
        "in": channels,
        "out": y.shape[1],
        "group": weight.group,
        "x": rows(x),
        "weight": pointer(packed),
        "x_scale": pointer(x_scale),
        "bias": pointer(bias),
        "residual": rows(residual),
        "y": rows(y),
        "activation": activation,
        "scale": scale,
        "x_format": x_format,
        "x_group": x_group or 0,
        **weight.fields(),
    }
    scratch = kernels(target).llmc_linear_scratch(tokens, channels)
    call(target, f"quantized_{kernel}", [x.dtype], values, threads=threads, scratch=scratch, pool=pool)
    return y


def call_quantized_embedding(target: CpuTarget, ids: Tensor, weight: QuantizedWeight, y: Tensor) -> Tensor:
    """Run llmc_quantized_embedding_<dtype of y> into y and return y. ids: int32."""
    packed = weight.packed()
    values = {
        "tokens": len(ids),
        "channels": y.shape[1],
        "group": weight.group,
        "ids": pointer(ids),
        "weight": pointer(packed),
        "y": rows(y),
        **weight.fields(),
    }
    call(target, "quantized_embedding", [y.dtype], values)
    return y
