"""Compiled files of a cache entry with their hashes: they are used only if they are unchanged."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from llmc.cache.directory import CacheDirectory
from llmc.files.atomic_directory import AtomicDirectory
from llmc.files.storage_error import ELSEWHERE_CACHED, storage_error

_HASHES = "sha256.json"
_WORK, _CONTENT = "work", "compiled kernels"


def hashed_entry(
    cache: CacheDirectory, name: str, files: Sequence[str], compile: Callable[[Path], None], *, turn: str | None = None
) -> Path:
    """Find the entry with these files, or make it.

    Args:
        cache: where the entry is.
        name: the name of the entry.
        files: the names of the files that `compile` makes.
        compile: writes them into the directory that it is given. Whatever else is there afterwards is removed, also
            where the process is killed: compilers keep their temporary files there.
        turn: see CacheDirectory.find_or_make.

    Raises:
        LlmcError: what `compile` raises; and where the cache cannot be written.
    """

    def make(entry: Path) -> None:
        with AtomicDirectory(entry, lambda broken: True, content=_CONTENT, elsewhere=ELSEWHERE_CACHED) as directory:
            work = directory.path / _WORK
            try:
                work.mkdir()
                compile(work)
                for file in files:
                    (work / file).rename(directory.path / file)
                shutil.rmtree(work)
                hashes = json.dumps(_hashes(directory.path, files))
                (directory.path / _HASHES).write_text(hashes, encoding="utf-8")
            except OSError as error:
                raise storage_error(error, entry, content=_CONTENT, elsewhere=ELSEWHERE_CACHED) from None
            directory.commit()

    return cache.find_or_make(name, lambda entry: _is_whole(entry, files), make, turn=turn)


def _is_whole(entry: Path, files: Sequence[str]) -> bool:
    try:
        return bool(json.loads((entry / _HASHES).read_text(encoding="utf-8")) == _hashes(entry, files))
    except (OSError, ValueError):
        return False


def _hashes(folder: Path, files: Sequence[str]) -> dict[str, str]:
    hashes = {}
    for name in files:
        with (folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
