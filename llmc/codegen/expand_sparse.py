"""Give weights their zeros back where a target reads them faster so: dense weights and plain codes, with their recipes.

sparse_bitmask(values, masks)        ->  the dense weight
sparse_codes(values, masks, scales)  ->  dequantize(codes, scales)
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

import llmc.ops  # noqa: F401  (registers the ops that are named here)
from llmc.codegen.call import arguments_of
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Derived, Recipe, stored_names

_llmc = torch.ops.llmc
SPARSE = frozenset({_llmc.sparse_bitmask.default, _llmc.sparse_codes.default})


def expand_sparse(graph: ModelGraph, reason: Callable[[fx.Node], str | None]) -> ModelGraph:
    """The graph with every sparse weight dense that `reason` has a reason for, which graph.sparse then says."""
    reasons = {node.name: why for node in graph.graph.nodes if node.target in SPARSE and (why := reason(node))}
    if not reasons:
        return graph
    graph = graph.copy()
    for node in list(graph.graph.nodes):
        if node.name in reasons:
            _note(graph, node, reasons[node.name])
            _expand(graph, node)
    return graph


def dense_recipe(values: Recipe, masks: Recipe, columns: int, dtype: torch.dtype) -> Recipe:
    """The dense weight of sparse values, including zeros."""
    if isinstance(values, Derived) and values.target is _llmc.sparse_values.default:
        dense: Recipe = values.args[0]
        return dense
    return Derived(_llmc.sparse_bitmask.default, (values, masks, columns, dtype))


def _expand(graph: ModelGraph, node: fx.Node) -> None:
    given = arguments_of(node)
    values, masks = given["values"], given["masks"]
    dtype, columns = values.meta["val"].dtype, given["columns"]
    recipe = dense_recipe(graph.weights[values.name], graph.weights[masks.name], columns, dtype)
    with graph.graph.inserting_before(values):
        dense = graph.graph.placeholder(values.name.removesuffix("_values") + "_expanded")
    dense.meta["val"] = values.meta["val"].new_empty((masks.meta["val"].shape[0], columns))
    graph.weights[dense.name] = recipe
    restored = dense
    if node.target is _llmc.sparse_codes.default:
        with graph.graph.inserting_before(node):
            arguments = (dense, given["scales"], None, given["format"], given["dtype"])
            restored = graph.graph.call_function(_llmc.dequantize.default, arguments)
        restored.meta.update(node.meta)
    node.replace_all_uses_with(restored)
    graph.graph.erase_node(node)
    for part in (values, masks):
        if not part.users:
            graph.graph.erase_node(part)
            del graph.weights[part.name]


def _note(graph: ModelGraph, node: fx.Node, why: str) -> None:
    names = set(stored_names(graph.weights[arguments_of(node)["values"].name]))
    graph.sparse = tuple(replace(s, bits=None, reason=why) if s.tensor in names else s for s in graph.sparse)
