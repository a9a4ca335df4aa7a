"""Capture of a plain nn.Module that maps token ids to logits, such as nanoGPT's model."""

from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CaptureError
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import MemorySource, parameter_dtype, parameters_of, tied_names
from llmc.frontends.front_end import FrontEnd
from llmc.frontends.tracing.fake_copy import fake_copy
from llmc.frontends.tracing.program_graph import graph_from_program
from llmc.frontends.tracing.trace import explained_at_once, trace
from llmc.frontends.transformers.config import resolve_dtype
from llmc.graph.model_graph import ModelInfo
from llmc.graph.weights import Recipe, Stored
from llmc.options import BuildOptions


def capture_module(module: nn.Module, weights: MemorySource, options: BuildOptions) -> Captured:
    """Capture forward(ids [1, T]) -> logits [1, T, vocab], or a tuple or object that holds them.

    The module is left as it was. Positions that it makes from arange stay in the graph; `positions` is an input of
    the graph as well, not used yet.
    """
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    if not floating:
        raise CaptureError(f"{type(module).__name__} has no floating-point parameters", fix="pass the whole model")
    dtype = resolve_dtype(options, floating[0])
    recipes: dict[str, Recipe] = {name: Stored(first, dtype) for name, first in tied_names(module).items()}
    program = trace(FirstLogits(fake_copy(module, dtype, cast_buffers=True)), with_positions=False)
    info = ModelInfo(type(module).__name__, "module", vocab_size=0, max_positions=None, dtype=dtype)
    graph = graph_from_program(program, recipes, info, prefix="module.")
    return Captured(graph, weights)


class FirstLogits(nn.Module):
    """A module as forward(ids) -> logits, whatever it returns them in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the module. input_ids: [1, T]."""
        with explained_at_once():
            return _logits(self.module(input_ids), type(self.module).__name__)


def _logits(output: Any, name: str) -> Tensor:
    if isinstance(output, dict):
        output = output.get("logits", next(iter(output.values()), None))
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise CaptureError(
            f"{name}.forward returns a {type(output).__name__} expected logits",
            fix="return the logits, a tuple that begins with them, or an object with .logits",
        )
    return output


MODULE = FrontEnd(
    "torch module",
    recognises=lambda model: isinstance(model, nn.Module),
    dtype=lambda opened: parameter_dtype(opened.given),
    weights=lambda opened: parameters_of(opened.given),
    capture=lambda opened, options, may_lack_weights: capture_module(opened.given, opened.weights, options),
    directory=lambda model: None,
)
