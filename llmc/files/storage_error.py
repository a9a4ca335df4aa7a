"""What to tell the user where a file cannot be written, or a disk is full."""

import errno
import shutil
from pathlib import Path

from llmc.errors import EngineFormatError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
