"""Large page-aligned memory that costs nothing until it is touched."""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.files.mapped_file import HUGE_PAGE_BYTES
from llmc.processes.cgroups import memory_limit

Bytes = npt.NDArray[np.uint8]


def zeros(nbytes: int) -> Bytes:
    """`nbytes` zero bytes, page-aligned; in huge pages where the system grants them, which saves TLB misses."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes)


def available_bytes() -> int:
    """Memory that this process can still take without swapping, as Linux estimates it, within its container's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = memory_limit()
    return available if limit is None else min(available, limit.left)
