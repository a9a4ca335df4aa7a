"""The engine directory: what llmc writes and what the runtime reads, whole or not at all."""

from llmc.engine_format.engine_files import EngineFiles
from llmc.engine_format.manifest import FORMAT_VERSION, Manifest, ModelRecord, PassRecord, TargetRecord
from llmc.engine_format.reader import EngineDirectory, engine_files, read_engine, start_engine

__all__ = [
    "FORMAT_VERSION",
    "EngineDirectory",
    "EngineFiles",
    "Manifest",
    "ModelRecord",
    "PassRecord",
    "TargetRecord",
    "engine_files",
    "read_engine",
    "start_engine",
]
