"""Run a bare fx.Graph eagerly, with what its placeholders stand for given by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx


class GraphInterpreter(fx.Interpreter):
    """Intermediates are dropped after their last use. llmc.ops must have been imported."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._inputs: Mapping[str, Tensor] = {}

    def outputs(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the graph returns, the logits first; every placeholder's value is in `inputs`, under its name."""
        self._inputs = inputs
        with torch.inference_mode():
            result: Tensor | Sequence[Tensor] = self.run()
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def run_node(self, n: fx.Node) -> object:
        return self._inputs[n.name] if n.op == "placeholder" else super().run_node(n)
