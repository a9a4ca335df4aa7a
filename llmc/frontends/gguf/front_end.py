"""GGUF files as a front end: each becomes a model directory that links to it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc.frontends.checkpoints.model_directory import model_directory
from llmc.frontends.gguf.files import SUFFIX, gguf_files

if TYPE_CHECKING:
    from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource


def _is_file(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def _place(path: Path) -> Path:
    if not _is_file(path):
        return path
    from llmc.frontends.gguf.model_directory import gguf_directory

    return gguf_directory(path)


def _weights(directory: Path) -> CheckpointSource:
    from llmc.frontends.gguf.source import GgufSource

    return GgufSource(directory)


GGUF = model_directory("GGUF", lambda path: _is_file(path) or bool(gguf_files(path)), _weights, place=_place)
