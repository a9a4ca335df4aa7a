"""Run a bare fx.Graph eagerly, with the values of its placeholders given by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.ranks import OnRanks, call, first_rank


class GraphInterpreter:
    """Intermediates are dropped after their last use. llmc.ops must have been imported. The graph stays as it is.

    An fx.Interpreter without its bookkeeping per call, which costs more than a small op.
    """

    def __init__(self, graph: fx.Graph) -> None:
        last = {source: node for node in graph.nodes for source in node.all_input_nodes}
        *nodes, self._output = graph.nodes
        # Each node, and those whose last use it is.
        self._nodes = [(node, [operand for operand in node.all_input_nodes if last[operand] is node]) for node in nodes]

    def outputs(self, inputs: Mapping[str, Tensor | OnRanks]) -> tuple[Tensor, ...]:
        """The graph's results on the first rank, logits first. `inputs` has every placeholder by its name."""
        with torch.inference_mode():
            result = self._run(inputs, any(isinstance(value, OnRanks) for value in inputs.values()))
        returned: Sequence[Any] = result if isinstance(result, Sequence) else (result,)
        return tuple(map(first_rank, returned))

    def run_readers(self, name: str, inputs: Mapping[str, Tensor | OnRanks]) -> None:
        """Run the nodes that a placeholder's value reaches, and no others. inputs: the values of all placeholders that
        they read."""
        values: dict[fx.Node, Any] = {}
        with torch.inference_mode():
            for node, _ in self._nodes:
                sources = node.all_input_nodes
                if any(source in values or source.name == name for source in sources):
                    arguments = {source: values.get(source, inputs.get(source.name)) for source in sources}
                    args: Any = fx.map_arg(node.args, arguments.__getitem__)
                    kwargs: Any = fx.map_arg(node.kwargs, arguments.__getitem__)
                    values[node] = call(node.target, args, kwargs)

    def _run(self, inputs: Mapping[str, Tensor | OnRanks], has_ranks: bool) -> Any:
        values: dict[fx.Node, Any] = {}
        for node, done in self._nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.name]
                continue
            args: Any = fx.map_arg(node.args, values.__getitem__)
            kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
            target: Any = node.target
            values[node] = call(target, args, kwargs) if has_ranks else target(*args, **kwargs)
            for operand in done:
                del values[operand]
        return fx.map_arg(self._output.args[0], values.__getitem__)
