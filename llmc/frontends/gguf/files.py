"""Which files are GGUF, and which of them a model directory links to. Imports no torch."""

from pathlib import Path

SUFFIX = ".gguf"
LINK = "model"


def gguf_files(directory: Path) -> tuple[Path, ...]:
    """The files that a directory made by `gguf_directory` links to; nothing for any other directory.

    Errors name these files, which the user gave, and not the links in the cache.
    """
    return tuple(_linked(file) for file in sorted(directory.glob(f"{LINK}-*{SUFFIX}")))


def _linked(file: Path) -> Path:
    return file.readlink() if file.is_symlink() else file
