"""Put zeros into a weight: its recipe changes, no data is touched."""

import torch
from torch import Tensor

from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Derived, Recipe, stored_names
from llmc.ops.sparse_weight import is_stored, mask_words
from llmc.passes.quantization.file_backed import file_backed
from llmc.passes.sparsity.plan import PlannedZeros

_llmc = torch.ops.llmc


def prune_weight(graph: ModelGraph, planned: PlannedZeros, kept: Tensor) -> None:
    """Make the elements zero that are not kept: [out, in], bool. The others stay what the checkpoint says."""
    recipe = graph.weights[planned.weights[0].name]
    _set(graph, planned, Derived(_llmc.pruned.default, (recipe, Constant(file_backed(mask_words(kept))))))


def replace_weight(graph: ModelGraph, planned: PlannedZeros, value: Tensor) -> None:
    """Give a weight other elements [out, in], most of them zero; of its dtype."""
    stored = is_stored(value)
    names = stored_names(graph.weights[planned.weights[0].name])
    parts = Constant(file_backed(value[stored]), names), Constant(file_backed(mask_words(stored)))
    _set(graph, planned, Derived(_llmc.sparse_bitmask.default, (*parts, value.shape[1], value.dtype)))


def _set(graph: ModelGraph, planned: PlannedZeros, recipe: Recipe) -> None:
    """Of one placeholder, which all readers of a tied weight read from now on."""
    first, *others = planned.weights
    graph.weights[first.name] = recipe
    for other in others:
        for reader in planned.readers:
            reader.replace_input_with(other, first)
