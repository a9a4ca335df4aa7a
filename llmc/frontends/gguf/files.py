"""Which files are GGUF, and which of them a model directory links to. Imports no torch."""

from pathlib import Path

SUFFIX = ".gguf"
LINK = "model"


def gguf_files(directory: Path) -> tuple[Path, ...]:
    """The files that a directory made by `gguf_directory` links to; nothing for any other directory."""
    return tuple(sorted(directory.glob(f"{LINK}-*{SUFFIX}")))
