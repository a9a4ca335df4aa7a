"""Trust in cache entries, which hold code: entries that another user owns or may write are refused."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from llmc.errors import OptionError

ELSEWHERE = "set LLMC_CACHE_DIR to a folder of your own that you may write to"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter. An existing one must belong to this user. Raises OptionError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = _distrust(folder.stat())
    except OSError as error:
        raise OptionError(f"cannot create the cache: {error.strerror}", at=folder, fix=ELSEWHERE) from None
    if reason is not None:
        raise OptionError(
            f"the cache {reason}, so its contents cannot be trusted",
            at=folder,
            fix=f"{ELSEWHERE}; or remove it; or, if no other user has written to it: chmod -R go-w {folder}",
        )


def distrust(path: Path) -> str | None:
    """Return why a file or directory with all that is in it is not to be used; None if it may be, or does not exist."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        inside = path.rglob("*") if stat.S_ISDIR(status.st_mode) else ()
        return _distrust(status) or next((reason for entry in inside if (reason := _distrust(entry.lstat()))), None)
    return None


def close_to_others(path: Path) -> None:
    """Take the right to write from everybody else: a umask may have given it to the group."""
    for entry in (path, *path.rglob("*")):
        mode = entry.lstat().st_mode
        if mode & _OTHERS_MAY_WRITE and not stat.S_ISLNK(mode):
            entry.chmod(stat.S_IMODE(mode) & ~_OTHERS_MAY_WRITE)


def _distrust(status: os.stat_result) -> str | None:
    """The reason not to use a file with that owner and mode. Root is trusted, because it can write everything
    anyway."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & _OTHERS_MAY_WRITE and not stat.S_ISLNK(status.st_mode):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None
