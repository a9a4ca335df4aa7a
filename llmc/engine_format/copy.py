"""Copy an engine to another place, whole or not at all."""

from dataclasses import replace
from pathlib import Path

from llmc.engine_format.manifest import Manifest
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError


def copy_engine(source: Path, manifest: Manifest, destination: Path) -> Path:
    """Copy the files of the manifest; what was an engine at the destination is replaced. Raises EngineFormatError."""
    with EngineWriter(destination) as writer:
        for name in manifest.files:
            writer.copy_file(name, source / name)
        written = writer.finish(replace(manifest, files={}))
        if written.files != manifest.files:
            raise EngineFormatError("the engine changed while it was copied", at=source, fix="load it again")
    return destination
