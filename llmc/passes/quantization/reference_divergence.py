"""How far a quantized graph's next-token distributions are from those of the graph as it was, on given text."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource
from llmc.passes.quantization.stream import Stream


class Reference:
    """The unquantized graph on some sequences: [length] ids each. Memory holds what it computed before its last product
    and one layer of the graph that is compared."""

    def __init__(self, graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> None:
        self._graph, self._source, self._sequences = graph, source, sequences

    def divergence(self, graph: ModelGraph) -> float:
        """The mean over tokens of KL(reference ‖ graph), in nats."""
        stream = _at_the_last_product(graph, self._source, self._sequences)
        total = tokens = 0.0
        for log_p, log_q in zip(_log_probabilities(self._plain), _log_probabilities(stream), strict=True):
            each = (log_p.exp() * (log_p - log_q)).sum(-1)
            total += float(each.double().sum())
            tokens += len(each)
        return total / tokens

    @cached_property
    def _plain(self) -> Stream:
        return _at_the_last_product(self._graph, self._source, self._sequences)


def _at_the_last_product(graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> Stream:
    stream = Stream(graph, source, sequences)
    for _ in stream.stops(graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)):
        pass
    return stream


def _log_probabilities(stream: Stream) -> Iterator[Tensor]:
    for logits in stream.outputs():
        yield logits.float().log_softmax(-1)
