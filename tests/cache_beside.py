"""A cache of a test's own, which has what takes minutes to make from the shared one."""

from __future__ import annotations

from pathlib import Path

from llmc.cache import CacheKind, open_cache

SHARED = (CacheKind.KERNELS, CacheKind.CAPTURES, CacheKind.GPU_KERNELS, CacheKind.TRITON)


def cache_beside(root: Path) -> Path:
    """Make it there: with this process's kernels and captures, without engines and their code."""
    root.mkdir(mode=0o700)
    for kind in SHARED:
        (root / kind.value).symlink_to(open_cache(kind).path)
    return root
