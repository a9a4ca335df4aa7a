"""Open files of untrusted origin: only regular ones, so that a pipe or a device cannot block the reader.

A link is followed, and its target must be a regular file.
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
    """Open a file for reading. Raises EngineFormatError if it is not a regular file, OSError if it cannot be opened."""
    # Opening a pipe would wait for a writer without O_NONBLOCK, which has no effect on a regular file.
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
