"""Nodes of a serving graph that were fused with their neighbours, and those that still could be."""

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.step_inputs import has_selected_logits
from llmc.report.coverage.aten import ACTIVATIONS, is_scaling, source
from llmc.report.coverage.rule import calls, calls_to

aten, ops = torch.ops.aten, torch.ops.llmc
ADDING_NORMS = (ops.add_rms_norm.default, ops.add_layer_norm.default)


def _is_product(node: fx.Node) -> bool:
    """Whether it is a product whose neighbours fusion passes look for."""
    return node.target in (ops.linear.default, ops.fused_linear.default)


def gated_products(graph: ModelGraph) -> list[fx.Node]:
    """Gates of two products."""
    gates = calls_to(graph, ops.gated_activation.default)
    return [n for n in gates if all(_is_product(source(a)) for a in n.all_input_nodes)]


def activated_products(graph: ModelGraph) -> list[fx.Node]:
    """Activations of a product."""
    activations = calls_to(graph, *ACTIVATIONS, aten.tanh.default)
    return [n for n in activations if n.all_input_nodes[0].target is ops.linear.default]


def activations_done(graph: ModelGraph) -> int:
    """Activations that a product computes."""
    return sum(_is_epilogue(n, "activation", "identity") for n in calls(graph))


def _is_epilogue(node: fx.Node, argument: str, without: object) -> bool:
    return node.target is ops.fused_linear.default and call_arguments(node)[argument] != without


def residual_sums(graph: ModelGraph) -> list[fx.Node]:
    """Sums of two matrices, one being a product without a fused sum."""
    return [
        n
        for n in calls_to(graph, aten.add.Tensor)
        if len(n.all_input_nodes) == 2
        and len({str(a.meta["val"].shape) for a in n.all_input_nodes}) == 1
        and any(_is_open_product(a) for a in n.all_input_nodes)
    ]


def _is_open_product(node: fx.Node) -> bool:
    if is_scaling(node):
        node = node.all_input_nodes[0]
    return _is_product(node) and not _is_epilogue(node, "residual", None)


def residuals_done(graph: ModelGraph) -> int:
    """Sums that a product or a norm computes."""
    inside = sum(_is_epilogue(n, "residual", None) for n in calls(graph))
    return inside + len(calls_to(graph, *ADDING_NORMS))


def merged_reads(graph: ModelGraph) -> int:
    """Products whose result is cut into columns: several made one."""
    return sum(_is_product(n) and sum(u.target is aten.slice.Tensor for u in n.users) > 1 for n in calls(graph))


def shared_reads(graph: ModelGraph) -> list[fx.Node]:
    """Values that several plain products with weights read; each stands for one that could be."""
    plain = ([u for u in n.users if u.target is ops.linear.default and u.args[0] is n] for n in graph.graph.nodes)
    return [readers[-1] for readers in plain if len(readers) > 1]


def rotated_writes(graph: ModelGraph) -> list[fx.Node]:
    """Writes of keys that are rotated right before."""
    writes = calls_to(graph, ops.kv_write.default)
    return [n for n in writes if source(n.all_input_nodes[0]).target is ops.rope.default and not _is_of_latents(n)]


def _is_of_latents(write: fx.Node) -> bool:
    """Whether only a part of each key is rotated, and queries are concatenated from parts as well."""
    readers = call_arguments(write)["k_cache"].users
    return any(u.target is ops.paged_attention.default and call_arguments(u)["latent"] for u in readers)


def selected(graph: ModelGraph) -> int:
    """1 where the output has only the rows asked for."""
    return int(has_selected_logits(graph))


def unselected(graph: ModelGraph) -> list[fx.Node]:
    """The output, if it has more rows than were requested."""
    return [] if has_selected_logits(graph) else [graph.logits()]
