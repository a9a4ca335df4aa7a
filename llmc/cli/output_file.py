"""Files that verbs write: checked for write access before the work starts."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import OptionError


def check_output(*paths: Path | None) -> None:
    """Raise OptionError if a file is not writable, without writing it. None stands for no file."""
    for path in filter(None, paths):
        if path.is_dir():
            raise _cannot(path, errno.EISDIR)
        folder = path.parent
        if not folder.is_dir():
            raise _cannot(path, errno.ENOTDIR if folder.exists() else errno.ENOENT)
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise _cannot(path, errno.EACCES)


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON; None writes nothing. Raises OptionError if the file is not writable."""
    if path is not None:
        write_output(path, json.dumps(figures, indent=1) + "\n")


def write_output(path: Path, content: str | bytes) -> None:
    """Write the file. Raises OptionError where it cannot be."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _cannot(path, error.errno or errno.EIO) from None


def _cannot(path: Path, code: int) -> OptionError:
    return OptionError(f"cannot write the file: {os.strerror(code)}", at=path, fix="name another place")
