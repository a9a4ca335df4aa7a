"""ONNX files of decoders as a front end. Imports no torch and nothing of the onnx package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc.files.hub_model import HubFiles
from llmc.frontends.front_end import FrontEnd, OpenedModel
from llmc.frontends.onnx.files import describing, onnx_file

if TYPE_CHECKING:
    from llmc.frontends.captured import Captured
    from llmc.frontends.onnx.source import OnnxSource
    from llmc.options import BuildOptions


def _weights(opened: OpenedModel[OnnxSource]) -> OnnxSource:
    from llmc.frontends.onnx.source import OnnxSource

    return OnnxSource(opened.given)


def _capture(opened: OpenedModel[OnnxSource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.onnx.capture import capture_onnx

    return capture_onnx(opened.weights, options)


# Of a repository without safetensors, the file in full precision, with the data that may lie beside it.
_DATA = ("", ".data", "_data", "_data_?")
_HUB_FILES = tuple(f"{folder}model.onnx{data}" for folder in ("", "onnx/") for data in _DATA)

ONNX = FrontEnd(
    "ONNX",
    recognises=lambda model: isinstance(model, Path) and onnx_file(model) is not None,
    dtype=lambda opened: opened.weights.dtype(),
    weights=_weights,
    capture=_capture,
    place=lambda path: onnx_file(path) or path,
    directory=describing,
    hub=HubFiles(_HUB_FILES),
)
