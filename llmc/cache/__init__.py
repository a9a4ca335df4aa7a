"""The cache under LLMC_CACHE_DIR: a folder per kind of entry, private, bounded, and cleared of leftovers."""

from llmc.cache.contents import CacheEntry, CacheKind, cache_entries, cache_limit
from llmc.cache.directory import open_cache
from llmc.cache.trust import make_private

__all__ = [
    "CacheEntry",
    "CacheKind",
    "cache_entries",
    "cache_limit",
    "make_private",
    "open_cache",
]
