"""A folder of the cache: entries appear whole, are made once, and are used only if nobody else could write them.

Each entry has a name made from all that it was made from. What is being made has a hidden name and is locked by its
process: what is hidden and not locked was left by one that was killed, and is removed by the next that makes something.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from llmc.cache.contents import (
    LOCK_SUFFIX,
    CacheEntry,
    CacheKind,
    cache_entries,
    entry_paths,
    remove_entry,
    sweep,
    trim_cache,
    was_just_used,
)
from llmc.cache.trust import ELSEWHERE, close_to_others, distrust, make_private
from llmc.errors import OptionError
from llmc.files.file_lock import is_at, wait_for_lock
from llmc.files.locked_directory import TEMPORARY_SUFFIX
from llmc.settings import settings


def open_cache(kind: CacheKind, root: Path | None = None) -> "CacheDirectory":
    """The folder of a kind, made if need be. root: settings().cache_dir unless given.

    Raises OptionError if it cannot be made, or if another user owns it or may write to it.
    """
    root = settings().cache_dir if root is None else root
    make_private(root)
    make_private(root / kind.value)
    return CacheDirectory(root, kind)


class CacheDirectory:
    """The entries of a kind. Made by `open_cache`."""

    def __init__(self, root: Path, kind: CacheKind) -> None:
        self.path = root / kind.value
        self._root = root
        self._kind = kind
        self._trimmed = root / ".trimmed"

    def find_or_make(
        self,
        name: str,
        is_whole: Callable[[Path], bool],
        make: Callable[[Path], object],
        *,
        turn: str | None = None,
    ) -> Path:
        """The entry of that name, marked as used; `make(path)` puts it there, whole, if it is not there or not whole.

        Those who make an entry of one name wait for each other, as do all with the same `turn`. Raises OptionError for
        an entry that others own or may write, and what `make` raises.
        """
        path = self.path / name
        if distrust(path) is None and is_whole(path):
            _mark_used(path)
            return path
        with self.turn(turn or name):
            self.check(path)
            if not is_whole(path):
                sweep(self.path)
                make(path)
                close_to_others(path)
            _mark_used(path)
        self._tidy_if_due()
        return path

    def read_text(self, name: str) -> str | None:
        """A text entry, marked as used; None if there is none that is whole. Raises OptionError for one that others own
        or may write."""
        path = self.path / name
        self.check(path)
        try:
            digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        if digest != _digest(text):
            return None
        _mark_used(path)
        return text

    def write_text(self, name: str, text: str) -> None:
        """Put a text entry there, whole, after a line with its SHA-256. Raises OSError, as for a full disk."""
        temporary = self.path / f".{name}.{os.urandom(6).hex()}{TEMPORARY_SUFFIX}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                wait_for_lock(descriptor)
                file.write(f"{_digest(text)}\n{text}")
                file.flush()
                temporary.replace(self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._tidy_if_due()

    def check(self, path: Path) -> None:
        """Raise OptionError for an entry, which need not exist, that others own or may write."""
        reason = distrust(path)
        if reason is not None:
            raise OptionError(
                f"{path.name} in the cache {reason}, so it is not used",
                at=path,
                fix=f"remove it: llmc cache clear {self._kind.value}",
            )

    def check_all(self) -> None:
        """The same for every entry: for a folder that another program reads."""
        for path in entry_paths(self.path):
            self.check(path)

    def clear(self) -> tuple[list[CacheEntry], list[CacheEntry]]:
        """Remove all entries, and what killed processes have left; what was removed, and what is in use and stays."""
        sweep(self.path)
        removed: list[CacheEntry] = []
        left: list[CacheEntry] = []
        for entry in cache_entries(self._root, self._kind):
            (removed if remove_entry(entry.path) else left).append(entry)
        return removed, left

    def tidy(self) -> None:
        """Remove what killed processes have left, and of what all kinds hold beyond the bound what was used longest
        ago."""
        sweep(self.path)
        self._trimmed.touch(mode=0o600)
        trim_cache(self._root, settings().cache_bytes)

    def _tidy_if_due(self) -> None:
        """After a small entry once a minute: looking at every file takes 0.5 s when there are 18,000."""
        if self._kind.is_large or not was_just_used(self._trimmed):
            self.tidy()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Wait until nobody else, in this process or another, has the turn of that name.

        Nothing depends on it: where the file system knows no locks, both make the same.
        """
        path = self.path / f".{name}{LOCK_SUFFIX}"
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise OptionError(
                    f"the cache cannot be written: {error.strerror}", at=self.path, fix=ELSEWHERE
                ) from None
            wait_for_lock(descriptor)
            if is_at(descriptor, path):
                break
            os.close(descriptor)  # Who had the turn before has removed the file.
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _mark_used(path: Path) -> None:
    with suppress(OSError):  # It may have just gone, or the disk may be read-only.
        os.utime(path)
