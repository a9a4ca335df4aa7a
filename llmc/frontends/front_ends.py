"""The front ends, one line each. None of them is imported."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmc.files.hub_model import HubFiles
from llmc.frontends.front_end import FrontEnd


@dataclass(frozen=True)
class Row:
    """The module and name of a front end's record. hub: the files of a repository on the hub that hold weights of this
    kind; None if repositories are not searched for them."""

    module: str
    name: str
    hub: HubFiles | None = None


# Directories of other formats (onnx/, original/) and duplicate weights are left out.
_SAFETENSORS = HubFiles(("*.safetensors",), left_out=("*/*", "consolidated*.safetensors"))
# If a repository has none of these, the file in full precision, with its external data.
_DATA = ("", ".data", "_data", "_data_?")
_ONNX = HubFiles(tuple(f"{folder}model.onnx{data}" for folder in ("", "onnx/") for data in _DATA))

# The first front end that recognises a model reads it. Paths and objects in memory have separate lists.
OF_PATHS: tuple[Row, ...] = (
    Row("llmc.frontends.gguf.front_end", "GGUF"),
    Row("llmc.frontends.onnx.front_end", "ONNX", _ONNX),
    Row("llmc.frontends.checkpoints.front_ends", "SPARSE"),
    Row("llmc.frontends.checkpoints.front_ends", "QUANTIZED"),
    Row("llmc.frontends.checkpoints.front_ends", "DENSE", _SAFETENSORS),
    Row("llmc.frontends.checkpoints.front_ends", "CONFIG_ALONE"),
)
OF_OBJECTS: tuple[Row, ...] = (
    Row("llmc.frontends.transformers.pretrained", "PRETRAINED"),
    Row("llmc.frontends.modules.module", "MODULE"),
    Row("llmc.frontends.modules.exported_program", "PROGRAM"),
)


def front_ends(rows: Sequence[Row]) -> Iterator[FrontEnd[Any]]:
    """The records in order, each imported at its first use."""
    for row in rows:
        front_end: FrontEnd[Any] = getattr(import_module(row.module), row.name)
        yield front_end


def hub_files() -> tuple[HubFiles, ...]:
    """The kinds of weights that a repository is searched for, the one that is preferred first."""
    return tuple(row.hub for row in reversed(OF_PATHS) if row.hub is not None)
