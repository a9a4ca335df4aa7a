"""Capture of an ExportedProgram: what torch.export made of a module from token ids to logits."""

import torch
from torch import SymInt, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from llmc.errors import CaptureError
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.frontends.front_end import FrontEnd
from llmc.frontends.tracing.program_graph import graph_from_program, input_specs
from llmc.frontends.tracing.trace import explained, trace
from llmc.graph.dtype_names import torch_name
from llmc.graph.model_graph import ModelInfo
from llmc.graph.weights import Recipe, Stored
from llmc.options import BuildOptions


def capture_program(program: ExportedProgram, weights: MemorySource, options: BuildOptions) -> Captured:
    """Capture a program with one input of token ids, [1, T] or [batch, T] with T dynamic, that returns logits."""
    ids = _token_input(program)
    floating = [v.dtype for v in program.state_dict.values() if v.is_floating_point()]
    dtype = floating[0] if floating else torch.float32
    if options.dtype != "auto" and options.dtype != torch_name(dtype):
        raise CaptureError(
            f"the program was exported in {dtype}, and casts to it are part of it",
            at=f"dtype={options.dtype}",
            fix="export the module in that dtype, or leave dtype=auto",
        )
    one_row = ids.meta["val"].shape[0] == 1 and not isinstance(ids.meta["val"].shape[0], SymInt)
    if one_row:
        with explained():
            functional = program.run_decompositions({})
    else:
        functional = trace(program.module(), with_positions=False)
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    recipes: dict[str, Recipe] = {}
    for name in program.graph_signature.parameters:
        value = program.state_dict[name]
        key = (value.untyped_storage()._cdata, tuple(value.shape))
        recipes[name] = Stored(first.setdefault(key, name), value.dtype)
    info = ModelInfo("program", "module", vocab_size=0, max_positions=None, dtype=dtype)
    return Captured(graph_from_program(functional, recipes, info), weights)


def _token_input(program: ExportedProgram) -> fx.Node:
    users = [node for node, spec in input_specs(program).items() if spec.kind is InputKind.USER_INPUT]
    value = users[0].meta.get("val") if len(users) == 1 else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.is_floating_point():
        raise CaptureError(
            f"the program takes {len(users)} inputs ({', '.join(n.name for n in users)}), not one of token ids",
            fix="export a forward(ids) with ids [1, tokens], an integer tensor",
        )
    return users[0]


# Its casts are a part of it, so it is built in whatever dtype it was exported.
PROGRAM = FrontEnd(
    "exported program",
    recognises=lambda model: isinstance(model, ExportedProgram),
    dtype=lambda opened: None,
    weights=lambda opened: MemorySource(opened.given.state_dict),
    capture=lambda opened, options, may_lack_weights: capture_program(opened.given, opened.weights, options),
    directory=lambda model: None,
)
