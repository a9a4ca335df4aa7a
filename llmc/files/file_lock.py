"""Locks on files and directories (flock) that end with the process that holds them, however it ends."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the path's lock until it is closed; None if another holder has it, or the file system has
    no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def wait_for_lock(descriptor: int) -> None:
    """Hold the lock of an open file; where the file system knows no locks, nothing is held."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def share_lock(descriptor: int) -> None:
    """Hold the lock together with others who share it, for as long as the file is open or mapped, if the file system
    has locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a process holds the path's lock; also True if that is unknown."""
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
