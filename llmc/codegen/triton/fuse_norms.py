"""Join RMS norms with the matrix products that read them, so that a product's kernel may norm its rows itself.

    linear(rms_norm(x, norm, eps), weight, bias)           ->  norm_linear(x, norm, eps, weight, bias)
    gated_linear(rms_norm(x, norm, eps), weight, bias, a)  ->  norm_gated_linear(x, norm, eps, weight, bias, a)
Must have: the product is the norm's only reader; x has rank 2 and is no fp16, in which x·norm could overflow.

Whether the kernel norms or a launch before it does is a choice of candidates (kernels/product_tiling.py). This is part
of lowering and no pass, because other targets have no such kernels.
"""

from __future__ import annotations

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.graph.model_graph import ModelGraph

_llmc = torch.ops.llmc
_JOINED = {
    _llmc.linear.default: _llmc.norm_linear.default,
    _llmc.gated_linear.default: _llmc.norm_gated_linear.default,
}


def fuse_norms(graph: ModelGraph) -> ModelGraph:
    """A copy of the graph with the norms joined."""
    joined = graph.copy()
    for node in list(joined.graph.find_nodes(op="call_function", target=_llmc.rms_norm.default)):
        _join(joined.graph, node)
    return joined


def _join(graph: fx.Graph, norm: fx.Node) -> None:
    given = arguments_of(norm)
    value: torch.Tensor = given["x"].meta["val"]
    (reader, *others) = norm.users or (None,)
    if reader is None or others or reader.target not in _JOINED or value.dim() != 2 or value.dtype is torch.float16:
        return
    product = arguments_of(reader)
    if product["x"] is not norm or any(product[name] is norm for name in ("weight", "bias")):
        return
    activation = (product["activation"],) if "activation" in product else ()
    arguments = (given["x"], given["weight"], given["eps"], product["weight"], product["bias"], *activation)
    with graph.inserting_before(reader):
        node = graph.call_function(_JOINED[reader.target], arguments)
    node.meta = dict(reader.meta)
    reader.replace_all_uses_with(node)
    graph.erase_node(reader)
    graph.erase_node(norm)
