"""A directory for temporary files."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.files.locked_directory import locked_directory, remove_abandoned
from llmc.files.storage_error import storage_error

_START = "llmc"
_ELSEWHERE = "set TMPDIR to a directory"


class ScratchDirectory:
    """A private directory, removed with this object, at the latest when the process ends.

    Directories that killed processes have left in the same place are removed first. Usable as a context manager, which
    gives the path.

    Args:
        parent: where the directory is made; by default where temporary files go (TMPDIR).
        start: how the names of such directories in that place begin.

    Raises:
        EngineFormatError: the directory cannot be made there.
    """

    def __init__(self, parent: Path | None = None, start: str = _START) -> None:
        parent = _temporary_files() if parent is None else parent
        try:
            remove_abandoned(parent, start)
            self.path, lock = locked_directory(parent, start, mode=0o700)
        except OSError as error:
            raise storage_error(error, parent, content="temporary files", elsewhere=_ELSEWHERE) from None
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the directory now."""
        self._remove()


def _temporary_files() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        problem = "no directory for temporary files can be written: TMPDIR, /tmp, /var/tmp, and this directory are full"
        raise EngineFormatError(f"{problem} or closed", at="TMPDIR", fix=f"{_ELSEWHERE} on a disk with room") from None


def _remove(path: Path, lock: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
