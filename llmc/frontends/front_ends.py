"""What a model can come from: one line a front end, which names its module and its record there."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from llmc.frontends.front_end import FrontEnd

# The first that recognises a model reads it.
FRONT_ENDS: tuple[tuple[str, str], ...] = (
    ("llmc.frontends.gguf.front_end", "GGUF"),
    ("llmc.frontends.checkpoints.front_ends", "SPARSE"),
    ("llmc.frontends.checkpoints.front_ends", "QUANTIZED"),
    ("llmc.frontends.checkpoints.front_ends", "DENSE"),
    ("llmc.frontends.onnx.front_end", "ONNX"),
    ("llmc.frontends.checkpoints.front_ends", "CONFIG_ALONE"),
    ("llmc.frontends.modules.front_ends", "PRETRAINED"),
    ("llmc.frontends.modules.front_ends", "MODULE"),
    ("llmc.frontends.modules.front_ends", "PROGRAM"),
)


def front_ends() -> Iterator[FrontEnd[Any]]:
    """The front ends in order, each imported when it is asked for."""
    for module, name in FRONT_ENDS:
        found: FrontEnd[Any] = getattr(import_module(module), name)
        yield found
