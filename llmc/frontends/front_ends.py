"""What a model can come from: one line a front end. The first that recognises a model reads it."""

from typing import Any

from llmc.frontends.checkpoints.front_ends import CONFIG_ALONE, DENSE, QUANTIZED, SPARSE
from llmc.frontends.front_end import FrontEnd
from llmc.frontends.gguf.front_end import GGUF
from llmc.frontends.modules.front_ends import MODULE, PRETRAINED, PROGRAM
from llmc.frontends.onnx.front_end import ONNX

FRONT_ENDS: tuple[FrontEnd[Any], ...] = (
    GGUF,
    SPARSE,
    QUANTIZED,
    DENSE,
    ONNX,
    CONFIG_ALONE,
    PRETRAINED,
    MODULE,
    PROGRAM,
)
