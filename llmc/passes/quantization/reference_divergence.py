"""How far a quantized graph's next-token distributions are from those of the graph as it was, on given text."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource
from llmc.passes.parallel_map import parallel_map
from llmc.passes.quantization.stream import Stream

# Logits per chunk: few enough for intermediates to stay in a core's cache.
_LOGITS = 1 << 17


class Reference:
    """The unquantized graph on some sequences: [length] ids each. Memory holds what it computed before its last product
    and one layer of the graph that is compared."""

    def __init__(self, graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> None:
        self._graph, self._source, self._sequences = graph, source, sequences

    def divergence(self, graph: ModelGraph, *, is_rough: bool = False) -> float:
        """The mean over tokens of KL(reference ‖ graph), in nats. is_rough: compare every second sequence only."""
        chosen = range(0, len(self._sequences), 2 if is_rough else 1)
        plain, other = self._plain, _outputs(graph, self._source, [self._sequences[i] for i in chosen])
        per_sequence = parallel_map(
            lambda i: divergences(log_probabilities(plain(chosen[i])), other(i)), range(len(chosen))
        )
        return sum(float(rows.double().sum()) for rows in per_sequence) / sum(map(len, per_sequence))

    @cached_property
    def _plain(self) -> Callable[[int], Tensor]:
        return _outputs(self._graph, self._source, self._sequences)


def log_probabilities(logits: Tensor) -> Tensor:
    """The log-probabilities of each row, in fp32."""
    return logits.float().log_softmax(-1)


def divergences(log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ softmax of the logits) of each row, in nats: [rows]."""
    rows = max(1, _LOGITS // logits.shape[1])
    parts = zip(log_p.split(rows), logits.split(rows), strict=True)
    return torch.cat([(p.exp() * (p - log_probabilities(other))).sum(-1) for p, other in parts])


def _outputs(graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """A function from the number of a sequence to its logits; everything except the last product is computed
    beforehand."""
    stream = Stream(graph, source, sequences)
    for _ in stream.stops(graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)):
        pass
    return stream.outputs()
