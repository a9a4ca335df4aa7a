"""torch.export of a module with a symbolic token count, to a functional program in aten."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

# The length of the example: not 1, which export would take for a constant, and unlike any usual model dimension.
EXAMPLE_TOKENS = 7


def trace(module: nn.Module) -> ExportedProgram:
    """Export forward(input_ids [1, T] int64, positions [1, T] int64) -> logits [1, T, vocab], without in-place ops."""
    tokens = Dim("T")
    example = (
        torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.int64),
        torch.arange(EXAMPLE_TOKENS, dtype=torch.int64).unsqueeze(0),
    )
    with torch.no_grad():
        program = export(module, example, dynamic_shapes=({1: tokens}, {1: tokens}), strict=False)
        functional: ExportedProgram = program.run_decompositions({})
    return functional
