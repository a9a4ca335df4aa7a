"""Tensors whose pages lie in an unnamed file, so that a quantized model need not fit in memory until it is written."""

from __future__ import annotations

import math
import mmap
import tempfile

import numpy as np
import torch
from torch import Tensor

from llmc.settings import settings

# What is smaller costs more as a file than it saves.
_LEAST_BYTES = 1 << 20


def file_backed(tensor: Tensor) -> Tensor:
    """The same tensor in a file of the cache directory that goes away with it; small ones stay in memory."""
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    if nbytes < _LEAST_BYTES:
        return tensor.contiguous()
    directory = settings().cache_dir
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(nbytes)
        pages = mmap.mmap(file.fileno(), nbytes)
    mapped = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(tensor.dtype).view(tensor.shape)
    mapped.copy_(tensor)
    pages.madvise(mmap.MADV_DONTNEED)
    return mapped
