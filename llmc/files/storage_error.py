"""Errors for files that cannot be written and for full disks."""

import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import EngineFormatError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The advice to choose another directory for the cache.
ELSEWHERE_CACHED = "set LLMC_CACHE_DIR to a directory"


def storage_error(
    error: OSError,
    path: Path,
    needed: int | None = None,
    *,
    content: str = "the engine",
    elsewhere: str = "choose an output",
) -> EngineFormatError:
    """The error of a failed write. needed: bytes that were still to be written, if known. content: what was written.
    elsewhere: how to name another place, which `that …` or `on …` may follow."""
    if error.errno not in NO_ROOM:
        return EngineFormatError(
            f"cannot write {content}: {error.strerror}", at=path, fix=f"{elsewhere} that you may write to"
        )
    folder = path if path.is_dir() else path.parent
    free = f"{shutil.disk_usage(folder).free} bytes are free" if folder.is_dir() else "the directory is gone"
    wanted = "" if needed is None else f"{needed} bytes are needed, "
    return EngineFormatError(
        f"there is no room for {content} ({error.strerror}): {wanted}{free}",
        at=path,
        fix=f"free some space, raise the quota or file size limit, or {elsewhere} on another disk",
    )


@contextmanager
def full_disk_told(*places: Path) -> Iterator[None]:
    """Raise an EngineFormatError for a full disk that nothing within has told of.

    Args:
        places: directories that are written to. Python does not say which of them is full where an open file was being
            written: then it is the one with the least room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        full = Path(error.filename) if isinstance(error.filename, str) else min(places, key=_free_bytes)
        raise storage_error(error, full, content="what is written here", elsewhere="choose a directory") from None


def require_room(place: Path, needed: int, *, content: str, elsewhere: str) -> None:
    """Raise EngineFormatError if the directory's disk has too few bytes free. Other arguments: as storage_error."""
    if _free_bytes(place) < needed:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise storage_error(full, place, needed, content=content, elsewhere=elsewhere)


def _free_bytes(place: Path) -> float:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return math.inf
