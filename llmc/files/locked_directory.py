"""Directories that are locked (flock) while their process lives: the next one removes what a killed one left."""

import os
import shutil
from pathlib import Path

from llmc.files.file_lock import try_lock

TEMPORARY_SUFFIX = ".llmc-tmp"
_ATTEMPTS = 16


def locked_directory(parent: Path, start: str, *, mode: int = 0o777) -> tuple[Path, int | None]:
    """Make `parent/START.RANDOM.llmc-tmp` and lock it.

    Another process may take a directory that is not locked yet for an abandoned one and remove it; then a new one is
    made.

    Returns:
        The directory, and the descriptor that holds the lock; None if the file system has no locks.

    Raises:
        OSError: the directory cannot be made.
    """
    for _ in range(_ATTEMPTS):
        path = parent / f"{start}.{os.urandom(6).hex()}{TEMPORARY_SUFFIX}"
        path.mkdir(mode)
        lock = try_lock(path)
        if lock is not None and path.exists():
            return path, lock
    path.mkdir(mode, exist_ok=True)
    return path, None


def remove_abandoned(parent: Path, start: str) -> None:
    """Delete this user's directories of that name whose process has ended."""
    for path in parent.glob(f"{_escaped(start)}.*{TEMPORARY_SUFFIX}"):
        lock = try_lock(path)
        if lock is None:
            continue
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
