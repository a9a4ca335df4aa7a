"""The pool, matrix-product and embedding structs of api.h for ctypes, and calls that take and return tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from llmc.codegen.cpp.kernel_library import Part, kernel_shared_library
from llmc.ops.activation import ACTIVATIONS
from llmc.targets import CpuTarget

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Rows(ctypes.Structure):
    """LlmcRows."""

    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Linear(ctypes.Structure):
    """LlmcLinear."""

    _fields_ = (
        ("tokens", c_int64),
        ("in_", c_int64),
        ("out", c_int64),
        ("x", Rows),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("residual", Rows),
        ("y", Rows),
        ("activation", c_int32),
        ("scale", c_float),
    )


class Embedding(ctypes.Structure):
    """LlmcEmbedding."""

    _fields_ = (("tokens", c_int64), ("channels", c_int64), ("ids", c_void_p), ("weight", c_void_p), ("y", Rows))


@cache
def kernels(target: CpuTarget, part: Part = Part.PLAIN) -> ctypes.CDLL:
    """A part of the target's kernels, with the pool's functions typed."""
    library = ctypes.CDLL(str(kernel_shared_library(target, part=part)))
    library.llmc_pool_create.argtypes = (c_int32, c_int64)
    library.llmc_pool_create.restype = c_void_p
    library.llmc_pool_destroy.argtypes = (c_void_p,)
    library.llmc_linear_scratch.argtypes = (c_int64, c_int64)
    library.llmc_linear_scratch.restype = c_int64
    return library


@contextmanager
def open_pool(target: CpuTarget, threads: int, scratch: int) -> Iterator[c_void_p]:
    """A thread pool of the target's kernels."""
    library = kernels(target)
    pool = library.llmc_pool_create(threads, scratch)
    assert pool
    try:
        yield c_void_p(pool)
    finally:
        library.llmc_pool_destroy(pool)


def rows(x: Tensor | None) -> Rows:
    """A matrix whose rows are contiguous, as LlmcRows; None is null data."""
    return Rows() if x is None else Rows(x.data_ptr(), x.stride(0))


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
    number = list(ACTIVATIONS).index(activation)
    bias = None if bias is None else bias.float()
    arguments = Linear(
        tokens,
        channels,
        y.shape[1],
        rows(x),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows(residual),
        rows(y),
        number,
        scale,
    )
    library = kernels(target)
    function = getattr(library, f"llmc_{kernel}_{SUFFIX[x.dtype]}")
    if pool is not None:
        function(pool, ctypes.byref(arguments))
        return y
    with open_pool(target, threads, library.llmc_linear_scratch(tokens, channels)) as own:
        function(own, ctypes.byref(arguments))
    return y


def call_embedding(target: CpuTarget, kernel: str, ids: Tensor, table: Tensor, y: Tensor) -> Tensor:
    """Run llmc_`kernel`_<dtype of y> (embedding, embedding_panels) into y and return y. ids: int32."""
    arguments = Embedding(ids.shape[0], y.shape[1], ids.data_ptr(), table.data_ptr(), rows(y))
    with open_pool(target, 2, 0) as pool:
        getattr(kernels(target), f"llmc_{kernel}_{SUFFIX[y.dtype]}")(pool, ctypes.byref(arguments))
    return y
