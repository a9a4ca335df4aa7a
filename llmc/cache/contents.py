"""The contents of the cache: their listing, the size limit, and the removal of leftovers of killed processes."""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llmc.files.file_lock import is_at, is_locked, try_lock
from llmc.files.locked_directory import TEMPORARY_SUFFIX

DEFAULT_BYTES = 50 * 10**9
LOCK_SUFFIX = ".lock"
# A process that has found an entry may not have opened it yet.
_JUST_USED_SECONDS = 60.0


class CacheKind(Enum):
    """A folder of the cache, by name."""

    ENGINES = "engines"
    CAPTURES = "captures"
    GGUF = "gguf"
    KERNELS = "kernels"
    PROGRAMS = "programs"
    DEVICE_KERNELS = "device-kernels"
    GPU_KERNELS = "gpu-kernels"
    TRITON = "triton"
    DIGESTS = "digests"

    @property
    def holds(self) -> str:
        """A readable description of the contents."""
        return _HOLDS[self]

    @property
    def is_large(self) -> bool:
        """Whether an entry matters for the bound: the others are small, and many."""
        return self in (CacheKind.ENGINES, CacheKind.KERNELS, CacheKind.DEVICE_KERNELS)


_HOLDS = {
    CacheKind.ENGINES: "engines of model directories",
    CacheKind.CAPTURES: "captured graphs",
    CacheKind.GGUF: "GGUF files' configs and tokenizers",
    CacheKind.KERNELS: "compiled C++ kernels",
    CacheKind.PROGRAMS: "engines' compiled C++",
    CacheKind.DEVICE_KERNELS: "engines' kernels for other GPUs",
    CacheKind.GPU_KERNELS: "compiled Triton kernels",
    CacheKind.TRITON: "what Triton keeps of them",
    CacheKind.DIGESTS: "digests of model files",
}


@dataclass(frozen=True)
class CacheEntry:
    """A file or directory of the cache. used: when last, in seconds since 1970."""

    kind: CacheKind
    path: Path
    nbytes: int
    used: float


def cache_entries(root: Path, *kinds: CacheKind) -> list[CacheEntry]:
    """Return all entries of these kinds, or of all kinds, in the order of kinds and names."""
    places = [(kind, path) for kind in kinds or CacheKind for path in entry_paths(root / kind.value)]
    return [entry for kind, path in places for entry in _described(kind, path)]


def entry_paths(folder: Path) -> list[Path]:
    """The entries in the folder of a kind, by name; what is hidden is none."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def cache_limit(root: Path, total: int, chosen: int | None) -> int:
    """Return the number of bytes that all entries may take together. total: bytes that they take now. chosen: the
    user's limit.

    Without, it is 50 GB, but at most half of the room that the cache and the disk's free space make up.
    """
    if chosen is not None or not root.exists():
        return DEFAULT_BYTES if chosen is None else chosen
    return min(DEFAULT_BYTES, (total + shutil.disk_usage(root).free) // 2)


def trim_cache(root: Path, chosen: int | None) -> None:
    """Remove the entries used longest ago until all together are within the limit.

    Entries that are in use, or were used within the last minute, are kept.
    """
    entries = sorted(cache_entries(root), key=lambda entry: entry.used)
    total = sum(entry.nbytes for entry in entries)
    limit = cache_limit(root, total, chosen)
    for entry in entries:
        if total <= limit or time.time() - entry.used < _JUST_USED_SECONDS:
            return
        if remove_entry(entry.path):
            total -= entry.nbytes


def was_just_used(path: Path) -> bool:
    """Whether a file was used, or made, within the last minute."""
    with suppress(OSError):
        return abs(time.time() - path.stat().st_mtime) < _JUST_USED_SECONDS
    return False


def remove_entry(path: Path) -> bool:
    """Remove an entry, at once under its name; False if it is in use, or cannot be removed, and stays."""
    with suppress(FileNotFoundError):  # Another process has removed it.
        if any(is_locked(entry) for entry in (path, *path.rglob("*"))):
            return not path.exists()
        aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}{TEMPORARY_SUFFIX}")
        try:
            path.rename(aside)
        except PermissionError:
            return False
        _remove(aside)
    return True


def sweep(folder: Path) -> None:
    """Remove the unfinished entries and the locks in a folder whose processes have ended."""
    for path in folder.glob(".*"):
        descriptor = try_lock(path) if path.name.endswith((TEMPORARY_SUFFIX, LOCK_SUFFIX)) else None
        if descriptor is not None:
            if is_at(descriptor, path):
                _remove(path)
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _described(kind: CacheKind, path: Path) -> Iterator[CacheEntry]:
    """Yield the entry at a path; nothing if it was deleted meanwhile. The last use is the access time of a file, or of
    the last file in a directory."""
    with suppress(OSError):
        status = path.lstat()
        inside = [entry.lstat() for entry in path.rglob("*")] if stat.S_ISDIR(status.st_mode) else []
        files = [entry for entry in (status, *inside) if stat.S_ISREG(entry.st_mode)]
        used = max([status.st_mtime, *(file.st_atime for file in files)])
        yield CacheEntry(kind, path, sum(file.st_size for file in files), used)
