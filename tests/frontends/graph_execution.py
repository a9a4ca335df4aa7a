"""Running a captured graph eagerly, with its weights from its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

import llmc.ops  # noqa: F401  (captured graphs call these ops)
from llmc.frontends.captured import Captured
from llmc.graph.weights import evaluate


def run_captured(captured: Captured, token_ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of a graph at stage captured."""
    inputs = {
        "input_ids": torch.tensor([list(token_ids)]),
        "positions": torch.arange(len(token_ids)).unsqueeze(0),
    }
    arguments = [
        inputs[node.name] if node.name in inputs else evaluate(captured.graph.weights[node.name], captured.source)
        for node in captured.graph.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad():
        logits: Tensor = fx.Interpreter(fx.GraphModule({}, captured.graph.graph)).run(*arguments)
    return logits[0]
