"""Random quantized weights, and the kernels over code panels called with tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.code_format import CODE_FORMATS
from llmc.codegen.cpp.kernel_library import Part
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.ops.activation import ACTIVATIONS
from llmc.ops.weight_codes import weight_codes, weight_scales, weight_zeros
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.linear_calls import SUFFIX, Rows, kernels, open_pool, rows

FORMATS = tuple(CODE_FORMATS)
X_FORMATS = ("none", "int8", "fp8")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class QuantizedLinear(ctypes.Structure):
    """LlmcQuantizedLinear."""

    _fields_ = (
        ("tokens", c_int64),
        ("in_", c_int64),
        ("out", c_int64),
        ("group", c_int64),
        ("x", Rows),
        ("weight", c_void_p),
        ("x_scale", c_void_p),
        ("bias", c_void_p),
        ("residual", Rows),
        ("y", Rows),
        ("activation", c_int32),
        ("scale", c_float),
        ("format", c_int32),
        ("x_format", c_int32),
        ("scale_type", c_int32),
        ("has_zeros", c_int32),
    )


class QuantizedEmbedding(ctypes.Structure):
    """LlmcQuantizedEmbedding."""

    _fields_ = (
        ("tokens", c_int64),
        ("channels", c_int64),
        ("group", c_int64),
        ("ids", c_void_p),
        ("weight", c_void_p),
        ("y", Rows),
        ("format", c_int32),
        ("scale_type", c_int32),
        ("has_zeros", c_int32),
    )


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as the ops take it."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def packed(self, *, gated: bool = False) -> Tensor:
        """Its code panels."""
        layout = Layout.GATED_CODE_PANELS if gated else Layout.CODE_PANELS
        return pack_codes(self.codes, self.scales, self.zeros, self.format, layout)


def quantized(
    out: int,
    channels: int,
    format: str,
    *,
    group: int | None = None,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Random weights of that shape, of magnitude 1 / sqrt(channels). group: None for a scale a row."""
    weight = torch.randn(out, channels) / channels**0.5
    scales = weight_scales(weight, format, group or channels, symmetric, 1, scale_dtype)
    zeros = None if symmetric else weight_zeros(weight, scales, format, 1)
    return QuantizedWeight(weight_codes(weight, scales, zeros, format), scales, zeros, format)


def call_quantized(
    target: CpuTarget,
    kernel: str,
    x: Tensor,
    weight: QuantizedWeight,
    y: Tensor,
    *,
    x_format: str = "none",
    x_scale: Tensor | None = None,
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
    arguments = QuantizedLinear(
        tokens,
        channels,
        y.shape[1],
        weight.group,
        rows(x),
        packed.data_ptr(),
        None if x_scale is None else x_scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows(residual),
        rows(y),
        list(ACTIVATIONS).index(activation),
        scale,
        FORMATS.index(weight.format),
        X_FORMATS.index(x_format),
        SCALE_DTYPES.index(weight.scales.dtype),
        weight.zeros is not None,
    )
    library = kernels(target, Part.CODED)
    function = getattr(library, f"llmc_quantized_{kernel}_{SUFFIX[x.dtype]}")
    if pool is not None:
        function(pool, ctypes.byref(arguments))
        return y
    with open_pool(target, threads, library.llmc_linear_scratch(tokens, channels)) as own:
        function(own, ctypes.byref(arguments))
    return y


def call_quantized_embedding(target: CpuTarget, ids: Tensor, weight: QuantizedWeight, y: Tensor) -> Tensor:
    """Run llmc_quantized_embedding_<dtype of y> into y and return y. ids: int32."""
    packed = weight.packed()
    arguments = QuantizedEmbedding(
        ids.shape[0],
        y.shape[1],
        weight.group,
        ids.data_ptr(),
        packed.data_ptr(),
        rows(y),
        FORMATS.index(weight.format),
        SCALE_DTYPES.index(weight.scales.dtype),
        weight.zeros is not None,
    )
    with open_pool(target, 2, 0) as pool:
        getattr(kernels(target, Part.CODED), f"llmc_quantized_embedding_{SUFFIX[y.dtype]}")(
            pool, ctypes.byref(arguments)
        )
    return y
