"""Matrix products and embeddings of api.h, called with tensors."""

from __future__ import annotations

from ctypes import c_void_p

from torch import Tensor

from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows


def call_linear(
    target: CpuTarget,
    kernel: str,
    x: Tensor,
    packed: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "identity",
    scale: float = 1.0,
    threads: int = 2,
    pool: c_void_p | None = None,
) -> Tensor:
    """Run llmc_`kernel`_<dtype of x> (linear, gated_linear, lm_head) into y and return y. packed: as pack gives it.

    pool: a new one of `threads` threads unless given.
    """
    tokens, channels = x.shape
    bias = None if bias is None else bias.float()
    values = {
        "tokens": tokens,
        "in": channels,
        "out": y.shape[1],
        "x": rows(x),
        "weight": pointer(packed),
        "bias": pointer(bias),
        "residual": rows(residual),
        "y": rows(y),
        "activation": activation,
        "scale": scale,
    }
    scratch = kernels(target).llmc_linear_scratch(tokens, channels)
    call(target, kernel, [x.dtype], values, threads=threads, scratch=scratch, pool=pool)
    return y


def call_embedding(target: CpuTarget, kernel: str, ids: Tensor, table: Tensor, y: Tensor) -> Tensor:
    """Run llmc_`kernel`_<dtype of y> (embedding, embedding_panels) into y and return y. ids: int32."""
    values = {"tokens": len(ids), "channels": y.shape[1], "ids": pointer(ids), "weight": pointer(table), "y": rows(y)}
    call(target, kernel, [y.dtype], values)
    return y
