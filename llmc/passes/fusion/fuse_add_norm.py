"""Sum and normalize in one pass over the row.

    s = add(x, r); rms_norm(s, w, eps)       ->  add_rms_norm(x, r, w, eps): the norm and s
    s = add(x, r); layer_norm(s, w, b, eps)  ->  add_layer_norm(x, r, w, b, eps): the norm and s
For the sums that fuse_linear_residual could not put into a product: where a norm comes after the product (Gemma 2,
OLMo 2), or tokens and positions are summed (GPT-2). Others may read s too.
Must have: x and r are matrices of one shape and dtype; w and b are weights, which are there before the sum is.
Numerics: exact, since s is rounded as before. Saves reading s once.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_ADD = torch.ops.aten.add.Tensor
_FUSED: dict[Any, torch._ops.OpOverload] = {
    torch.ops.llmc.rms_norm.default: torch.ops.llmc.add_rms_norm.default,
    torch.ops.llmc.layer_norm.default: torch.ops.llmc.add_layer_norm.default,
}


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every norm, in order; the first norm of a sum takes it, a second one reads what comes out."""
    for norm in [n for n in graph.graph.nodes if n.target in _FUSED]:
        total = call_arguments(norm)["x"]
        if total.target is not _ADD:
            continue
        refusal = _refusal(total) or _computed_weight(norm)
        if refusal is not None:
            log.refuse(refusal)
            continue
        log.step(f"{total.name} + {norm.name}", norm, total)
        _fuse(graph, total, norm)


fuse_add_norm = GraphPass("fuse_add_norm", run, Numerics.EXACT, Stage.OPTIMIZED)


def _refusal(total: fx.Node) -> Refusal | None:
    arguments = call_arguments(total)
    first, second, alpha = arguments["self"], arguments["other"], arguments["alpha"]
    if alpha != 1:
        return Refusal(f"the sum multiplies its second operand by {alpha}", total)
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return Refusal(f"the sum of {first} and {second} adds a number", total)
    if render_type(first) != render_type(second):
        return Refusal(f"the sum is of {render_type(first)} and {render_type(second)}", total)
    x: Tensor = first.meta["val"]
    if x.ndim != 2:
        return Refusal(f"the sum is {render_type(total)}, not a matrix of tokens", total)
    return None


def _computed_weight(norm: fx.Node) -> Refusal | None:
    for operand in norm.all_input_nodes:
        if operand.op != "placeholder" and operand is not call_arguments(norm)["x"]:
            return Refusal(f"the norm takes {operand.name}, which is computed and may come after the sum", norm)
    return None


def _fuse(graph: ModelGraph, total: fx.Node, norm: fx.Node) -> None:
    terms = [call_arguments(total)[name] for name in ("self", "other")]
    parameters = [value for name, value in call_arguments(norm).items() if name != "x"]
    # At the place of the sum, since others may read it before the norm does; norms take weights only beside it.
    with graph.graph.inserting_before(total):
        both = graph.graph.call_function(_FUSED[norm.target], (*terms, *parameters))
        normalized, kept = (graph.graph.call_function(getitem, (both, i)) for i in range(2))
    norm.replace_all_uses_with(normalized)
    total.replace_all_uses_with(kept)
    graph.graph.erase_node(norm)
    graph.graph.erase_node(total)
