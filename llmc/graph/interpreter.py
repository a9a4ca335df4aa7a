"""Run a bare fx.Graph eagerly, with what its placeholders stand for given by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.ranks import OnRanks, call, first_rank


class GraphInterpreter(fx.Interpreter):
    """Intermediates are dropped after their last use. llmc.ops must have been imported."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._inputs: Mapping[str, Tensor | OnRanks] = {}

    def outputs(self, inputs: Mapping[str, Tensor | OnRanks]) -> tuple[Tensor, ...]:
        """What the graph returns on the first rank, the logits first; `inputs` has every placeholder by its name."""
        self._inputs = inputs
        with torch.inference_mode():
            result: Any = self.run()
        returned: Sequence[Any] = result if isinstance(result, Sequence) else (result,)
        return tuple(map(first_rank, returned))

    def run_node(self, n: fx.Node) -> object:
        return self._inputs[n.name] if n.op == "placeholder" else super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        return call(target, args, kwargs)
