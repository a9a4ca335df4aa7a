"""ONNX files of decoders as a front end. Imports no torch and nothing of the onnx package."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


ONNX = FrontEnd(
    "ONNX",
    recognises=lambda path: onnx_file(path) is not None,
    dtype=lambda opened: opened.weights.dtype(),
    weights=_weights,
    capture=_capture,
    place=lambda path: onnx_file(path) or path,
    directory=describing,
)
