"""A folder of the cache: entries are created atomically and once, and are used only if no other user can write them.

The name of an entry is a digest of everything it depends on. An entry under construction has a hidden name and is
locked by its process. A hidden entry without a lock was left by a killed process; the next process that creates an
entry removes it.
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
        """Return the entry of that name, marked as used; `make(path)` creates it if it is missing or incomplete.

        Processes that create the same entry wait for each other, as do all with the same `turn`. Raises OptionError for
        an entry that another user owns or may write, and any exception of `make`.
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
        """Read a text entry and mark it as used. Returns None if there is no complete entry.

        Raises OptionError if another user owns the entry or may write it.
        """
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
        """Raise OptionError if others own or may write any entry, before another program reads the folder."""
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
        """Remove leftovers of killed processes, and the least recently used entries beyond the size limit over all
        kinds."""
        sweep(self.path)
        self._trimmed.touch(mode=0o600)
        trim_cache(self._root, settings().cache_bytes)

    def _tidy_if_due(self) -> None:
        """Tidy at most once per minute after small entries: listing 18,000 files takes 0.5 s."""
        if self._kind.is_large or not was_just_used(self._trimmed):
            self.tidy()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Wait until no other thread or process holds the turn of that name.

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
            os.close(descriptor)  # The previous holder of the turn has removed the file.
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _mark_used(path: Path) -> None:
    with suppress(OSError):  # It may have just been deleted, or the disk may be read-only.
        os.utime(path)
