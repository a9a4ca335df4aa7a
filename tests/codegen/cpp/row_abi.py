"""The kernels of rows and attention as Python sees them: the structs of kernels/api.h and a way to call each."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.cpp.kernel_library import Part, function_name, kernel_shared_library, part_of
from llmc.ops.activation import ACTIVATIONS
from llmc.targets import CpuTarget

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
ACTIVATION_NUMBER = {name: number for number, name in enumerate(ACTIVATIONS)}
# Against a reference that rounds at the same places: a few ulp of the type for values of order one.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_INT = ctypes.c_int32
_FLOAT = ctypes.c_float


class Rows(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("stride", _LONG))


class SelectRows(ctypes.Structure):
    _fields_ = (("selected", _LONG), ("channels", _LONG), ("rows", _POINTER), ("x", Rows), ("y", Rows))


class SelectChannels(ctypes.Structure):
    _fields_ = (("tokens", _LONG), ("channels", _LONG), ("order", _POINTER), ("x", Rows), ("y", Rows))


class Norm(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("groups", _LONG),
        ("channels", _LONG),
        ("x", Rows),
        ("residual", Rows),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("eps", _FLOAT),
        ("y", Rows),
        ("sum", Rows),
    )


class GatedActivation(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("channels", _LONG),
        ("gate", Rows),
        ("up", Rows),
        ("y", Rows),
        ("activation", _INT),
    )


class RopeAngles(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("half", _LONG),
        ("positions", _POINTER),
        ("inv_freq", _POINTER),
        ("scale", _FLOAT),
        ("cos", _POINTER),
        ("sin", _POINTER),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("heads", _LONG),
        ("head_dim", _LONG),
        ("half", _LONG),
        ("interleaved", _INT),
        ("x", Rows),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("y", Rows),
    )


class KvWrite(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("value_dim", _LONG),
        ("half", _LONG),
        ("block_size", _LONG),
        ("interleaved", _INT),
        ("q", Rows),
        ("k", Rows),
        ("v", Rows),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("slot_mapping", _POINTER),
        ("q_out", Rows),
        ("cache_group", _LONG),
    )


class PagedAttention(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("requests", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("value_dim", _LONG),
        ("block_size", _LONG),
        ("q", Rows),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        ("max_blocks", _LONG),
        ("scale", _FLOAT),
        ("window", _LONG),
        ("softcap", _FLOAT),
        ("sinks", _POINTER),
        ("y", Rows),
        ("cache_group", _LONG),
    )


def rows(tensor: Tensor | None) -> Rows:
    """The rows of a tensor whose first axis has any stride and whose others are contiguous; no data for None."""
    if tensor is None:
        return Rows(None, 0)
    assert tensor.numel() == 0 or tensor[0].is_contiguous()
    return Rows(tensor.data_ptr(), tensor.stride(0))


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor; None stays None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def call(
    target: CpuTarget,
    kernel: str,
    dtypes: Sequence[torch.dtype | str],
    arguments: ctypes.Structure,
    threads: int = 2,
    scratch: int = 64,
) -> None:
    """Run llmc_{kernel}_{dtypes} with a pool of its own."""
    with thread_pool(target, threads, scratch) as pool:
        function(target, kernel, dtypes)(pool, ctypes.byref(arguments))


def function(target: CpuTarget, kernel: str, dtypes: Sequence[torch.dtype | str]) -> Callable[..., Any]:
    """llmc_{kernel}_{dtypes}(pool, struct); a string names a cache's codes."""
    names = [d if isinstance(d, str) else _DTYPES[d] for d in dtypes]
    loaded: Callable[..., Any] = getattr(library(target, part_of(kernel, names)), function_name(kernel, names))
    return loaded


def scratch_bytes(target: CpuTarget, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """What a pool must own for each thread before it is given to paged_attention."""
    return int(library(target).llmc_paged_attention_scratch(heads, kv_heads, head_dim, value_dim))


@functools.cache
def library(target: CpuTarget, part: Part = Part.PLAIN) -> ctypes.CDLL:
    """A part of the kernels compiled for the target, with the types of the functions that return something."""
    loaded = ctypes.CDLL(str(kernel_shared_library(target, part=part)))
    loaded.llmc_pool_create.restype = _POINTER
    loaded.llmc_pool_create.argtypes = [_INT, _LONG]
    loaded.llmc_pool_destroy.argtypes = [_POINTER]
    loaded.llmc_paged_attention_scratch.restype = _LONG
    loaded.llmc_paged_attention_scratch.argtypes = [_LONG] * 4
    return loaded


@contextmanager
def thread_pool(target: CpuTarget, threads: int, scratch: int) -> Iterator[ctypes.c_void_p]:
    """A pool as kernels take it; scratch: bytes for each thread."""
    pool = _POINTER(library(target).llmc_pool_create(threads, scratch))
    assert pool
    try:
        yield pool
    finally:
        library(target).llmc_pool_destroy(pool)
