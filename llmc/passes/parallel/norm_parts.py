"""An RMS norm of channels that are cut into ranks: each normalizes its own, by the sum of squares of all of them."""

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.parallel.split import Split

aten = torch.ops.aten


def norm_parts(graph: ModelGraph, node: fx.Node, channels: int, shares: fx.Node | None) -> None:
    """Replace llmc.rms_norm. channels: number of channels of all ranks together. shares: the weight of each channel's
    square in the sum; None for 1."""
    arguments, dtype = call_arguments(node), node.meta["val"].dtype
    call = graph.graph.call_function
    with graph.graph.inserting_before(node):
        values = call(aten._to_copy.default, (arguments["x"],), {"dtype": torch.float32})
        squares = call(aten.square.default, (values,))
        if shares is not None:
            squares = call(aten.mul.Tensor, (squares, shares))
        total = call(aten.sum.dim_IntList, (squares, [-1], True))
        total = call(torch.ops.llmc.all_reduce.default, (total, graph.ranks))
        mean = call(aten.mul.Tensor, (total, 1.0 / channels))
        inverse = call(aten.rsqrt.default, (call(aten.add.Tensor, (mean, arguments["eps"])),))
        y = call(aten.mul.Tensor, (values, inverse))
        if arguments["weight"] is not None:
            y = call(aten.mul.Tensor, (y, arguments["weight"]))
        y = call(aten._to_copy.default, (y,), {"dtype": dtype})
    node.replace_all_uses_with(y)
    graph.graph.erase_node(node)


def channel_shares(split: Split) -> list[Tensor] | None:
    """The share with which each rank's channels count: 1 / n for a channel on n ranks; None if each rank has its
    own."""
    counts = torch.zeros(split.spans[-1][1])
    for start, stop in split.spans:
        counts[start:stop] += 1
    if counts.max() == 1:
        return None
    padding = [counts.new_zeros(split.length - (stop - start)) for start, stop in split.spans]
    return [torch.cat((1 / counts[slice(*span)], zeros)) for span, zeros in zip(split.spans, padding, strict=True)]
