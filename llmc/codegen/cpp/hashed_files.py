"""What compilers wrote into an entry of the cache, with its hashes: it runs only if it is still what they wrote."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from llmc.cache.directory import CacheDirectory
from llmc.files.atomic_directory import AtomicDirectory

_HASHES = "sha256.json"


def hashed_entry(
    cache: CacheDirectory, name: str, files: Sequence[str], compile: Callable[[Path], None], *, turn: str | None = None
) -> Path:
    """The entry with these files, which `compile` writes into a folder if it is not there or not whole. turn: as of
    CacheDirectory.find_or_make."""

    def make(entry: Path) -> None:
        with AtomicDirectory(entry, lambda broken: True) as directory:
            compile(directory.path)
            (directory.path / _HASHES).write_text(json.dumps(_hashes(directory.path, files)), encoding="utf-8")
            directory.commit()

    return cache.find_or_make(name, lambda entry: _is_whole(entry, files), make, turn=turn)


def _is_whole(entry: Path, files: Sequence[str]) -> bool:
    try:
        return bool(json.loads((entry / _HASHES).read_text(encoding="utf-8")) == _hashes(entry, files))
    except (OSError, ValueError):
        return False


def _hashes(folder: Path, files: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in files:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
