"""Tensors whose pages lie in an unnamed file, so that a quantized model need not fit in memory until it is written."""

import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmc.cache import make_private
from llmc.files.storage_error import ELSEWHERE_CACHED, storage_error
from llmc.settings import settings

# Minimum size in bytes: a file for a smaller tensor costs more than it saves.
_LEAST_BYTES = 1 << 20


def file_backed(tensor: Tensor) -> Tensor:
    """Move a tensor to a file of the cache directory, deleted with the tensor; small ones stay in memory.

    Raises EngineFormatError if the directory cannot be written or has no room.
    """
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    if nbytes < _LEAST_BYTES or tensor.is_meta:
        return tensor.contiguous()
    directory = settings().cache_dir
    try:
        pages = _pages(directory, nbytes)
    except OSError as error:
        raise storage_error(
            error, directory, nbytes, content="the quantized weights", elsewhere=ELSEWHERE_CACHED
        ) from None
    mapped = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(tensor.dtype).view(tensor.shape)
    mapped.copy_(tensor)
    pages.madvise(mmap.MADV_DONTNEED)
    return mapped


def _pages(directory: Path, nbytes: int) -> mmap.mmap:
    make_private(directory)
    with tempfile.TemporaryFile(dir=directory) as file:
        # Writing to a page that finds no block on the disk would kill the process.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return mmap.mmap(file.fileno(), nbytes)
