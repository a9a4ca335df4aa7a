"""What llmc keeps under LLMC_CACHE_DIR: a folder for each kind of thing, private, bounded, and swept of leftovers."""

from llmc.cache.contents import CacheEntry, CacheKind, cache_entries, cache_limit, remove_entry, trim_cache
from llmc.cache.directory import CacheDirectory, open_cache
from llmc.cache.trust import make_private

__all__ = [
    "CacheDirectory",
    "CacheEntry",
    "CacheKind",
    "cache_entries",
    "cache_limit",
    "make_private",
    "open_cache",
    "remove_entry",
    "trim_cache",
]
