"""A file's bytes as memory, in huge pages where the system has them."""

import mmap
from contextlib import suppress

from llmc.files.file_lock import share_lock

HUGE_PAGE_BYTES = 2 << 20


def mapped_file(descriptor: int) -> memoryview:
    """An open file's bytes, read-only, shared with every process that maps it. The file is not empty.

    Parts that are not in the page cache yet are read into it in huge pages. With small pages, decoding reads its
    weights 15 to 20% more slowly (two Zen 4 cores in a virtual machine, Linux 6.18, ext4).
    """
    share_lock(descriptor)  # As long as it is mapped: the cache does not remove what is in use.
    mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
