"""The onnx package, an extra, which reads the protobuf of a file and nothing else."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError


def import_onnx(file: Path) -> Any:
    """The package; raises CheckpointError that names the extra. file: what is to be read."""
    try:
        import onnx
    except ImportError as error:
        raise CheckpointError(
            f"reading an ONNX model needs the onnx package: {error}", at=file, fix='pip install "llmc-compiler[onnx]"'
        ) from error
    return onnx
