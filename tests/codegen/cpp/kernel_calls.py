"""Call the kernels of api.h one by one, with tensors and numbers by the names of their structs' fields."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_library import Part, function_name, load_kernels, part_of
from llmc.targets import CpuTarget

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}
# Of a kernel: the dtypes of what it reads; a string names a cache's codes.
Dtypes = Sequence[torch.dtype | str]


def rows(tensor: Tensor | None) -> tuple[int | None, int]:
    """The rows of a tensor whose first axis has any stride and whose others are contiguous; no data for None."""
    if tensor is None:
        return None, 0
    assert tensor.numel() == 0 or tensor[0].is_contiguous()
    return tensor.data_ptr(), tensor.stride(0)


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor; None stays None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def call(
    target: CpuTarget,
    family: str,
    dtypes: Dtypes,
    values: Mapping[str, Any],
    *,
    threads: int = 2,
    scratch: int = 64,
    pool: ctypes.c_void_p | None = None,
) -> None:
    """Run a kernel, with a pool of its own unless given. values: fields of its struct; what is left out is zero."""
    run = kernel_call(target, family, dtypes, values)
    if pool is not None:
        run(pool)
        return
    with open_pool(target, threads, scratch) as own:
        run(own)


def kernel_call(target: CpuTarget, family: str, dtypes: Dtypes, values: Mapping[str, Any]) -> Any:
    """The same call, to be made with a pool: again and again, or at another time."""
    names = [d if isinstance(d, str) else DTYPES[d] for d in dtypes]
    name = function_name(family, names)
    arguments = kernel_api().arguments(name, values)
    function = getattr(kernels(target, part_of(family, names)), name)
    return lambda pool: function(pool, ctypes.byref(arguments))


@functools.cache
def kernels(target: CpuTarget, part: Part = Part.PLAIN) -> ctypes.CDLL:
    """A part of the kernels compiled for the target."""
    return load_kernels(target, part=part)


@contextmanager
def open_pool(target: CpuTarget, threads: int, scratch: int) -> Iterator[ctypes.c_void_p]:
    """A pool as kernels take it; scratch: bytes for each thread."""
    pool = kernels(target).llmc_pool_create(threads, scratch)
    assert pool
    try:
        yield ctypes.c_void_p(pool)
    finally:
        kernels(target).llmc_pool_destroy(pool)
