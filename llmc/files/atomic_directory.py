"""Atomic creation of a directory: it is filled under a temporary name next to its destination, then renamed.

Leftovers of a killed process are removed by the next one with the same destination. A name with the suffix
TEMPORARY_SUFFIX is never loaded.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.files.locked_directory import TEMPORARY_SUFFIX, locked_directory, remove_abandoned
from llmc.files.storage_error import NO_ROOM, storage_error

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_SYNCED_AT_ONCE = 8


class AtomicDirectory:
    """Context manager: write into `path`, then `commit()`; leaving without it removes everything written.

    destination: a new name, an empty directory, or a directory for which `replaceable` is true; anything else is an
    EngineFormatError and is never touched. It stays as it was until the commit. content: what such a directory is.
    elsewhere: how to name another place for it, see `storage_error`.
    """

    def __init__(
        self,
        destination: Path,
        replaceable: Callable[[Path], bool],
        *,
        content: str = "an engine",
        elsewhere: str = "choose an output",
    ) -> None:
        self.destination = Path(os.path.realpath(destination))
        self._replaceable, self._content, self._elsewhere = replaceable, content, elsewhere
        self._check_destination()
        parent = self.destination.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent, f".{self.destination.name}")
            self.path, self._lock = locked_directory(parent, f".{self.destination.name}")
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._storage_error(error) from None
            raise EngineFormatError(
                f"cannot create a directory in {parent}: {error.strerror}",
                at=destination,
                fix=f"{elsewhere} in a directory that you may write to",
            ) from None

    def __enter__(self) -> "AtomicDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def commit(self) -> None:
        """Flush everything to disk, then rename; an existing directory is replaced atomically.

        If several processes commit to one destination, the last one wins.
        """
        try:
            tree = [(Path(folder), names) for folder, _, names in os.walk(self.path)]
            _sync_all([folder / name for folder, names in tree for name in names])
            _sync_all([folder for folder, _ in tree])
            self._check_destination()
            while not _put(self.path, self.destination):
                self._check_destination()  # Another process has created or removed the directory.
            _sync(self.destination.parent)
        except OSError as error:
            raise self._storage_error(error) from None

    def _storage_error(self, error: OSError) -> EngineFormatError:
        return storage_error(error, self.destination, content=self._content, elsewhere=self._elsewhere)

    def _check_destination(self) -> None:
        path = self.destination
        if not path.exists():
            return
        if not path.is_dir():
            raise EngineFormatError("the output exists and is a file", at=path, fix="choose another output name")
        if any(path.iterdir()) and not self._replaceable(path):
            raise EngineFormatError(
                f"the output exists and is not {self._content}, so it is not replaced",
                at=path,
                fix="choose another output name, or remove the directory yourself",
            )


def _sync_all(paths: Sequence[Path]) -> None:
    """Sync several files at a time, because a file system commits its records of them together."""
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as threads:
        for _ in threads.map(_sync, paths):
            pass


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(new: Path, destination: Path) -> bool:
    """Move a directory to a place that is free, empty or another directory's; False if that changed meanwhile."""
    try:
        new.rename(destination)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        if not _exchange_at_once(new, destination):
            exchange_by_renaming(new, destination)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False


def _exchange_at_once(new: Path, old: Path) -> bool:
    """Swap two directories in one system call; False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(old))


def exchange_by_renaming(new: Path, old: Path) -> None:
    """Swap two directories in three renames; between the first two there is nothing at `old`."""
    aside = new.with_name(f"{new.name.removesuffix(TEMPORARY_SUFFIX)}.old{TEMPORARY_SUFFIX}")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        with suppress(OSError):
            aside.rename(old)
        shutil.rmtree(aside, ignore_errors=True)  # It still exists if another process has taken its place.
        raise
    aside.rename(new)
