"""A directory's files as an engine's, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

from llmc.engine_format import EngineFiles
from llmc.engine_format.chunk_hash import ChunkHasher
from llmc.engine_format.manifest import FileRecord


def file_record(content: bytes) -> FileRecord:
    """What a manifest says of a file."""
    hasher = ChunkHasher()
    hasher.update(memoryview(content))
    return hasher.record()


def listed_files(directory: Path) -> EngineFiles:
    """All files in the directory, as if a manifest listed them."""
    files = {str(f.relative_to(directory)): f for f in sorted(directory.rglob("*")) if f.is_file()}
    return EngineFiles(directory, {name: file_record(file.read_bytes()) for name, file in files.items()})
