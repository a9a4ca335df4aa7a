"""Open files that somebody else may have put there: regular ones only, so that no pipe or device can hang the reader.

A link is followed; it is what it leads to that must be a regular file.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

from llmc.errors import EngineFormatError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BufferedReader:
    """The file, to be read. Raises EngineFormatError for what is no regular file, OSError for what cannot be
    opened."""
    # Opening a pipe would wait for who writes to it, but for O_NONBLOCK, which means nothing to a regular file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise EngineFormatError(
        f"it is {kind}, not a regular file", at=path, fix="copy the whole engine again, or rebuild it"
    )


def read_regular(path: Path, most: int) -> bytes:
    """The whole of a regular file of at most that many bytes. Raises EngineFormatError, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise EngineFormatError(
                f"the file has {size} bytes, more than the {most} that are read of such a file",
                at=path,
                fix="copy the whole engine again, or rebuild it",
            )
        return file.read(size)
