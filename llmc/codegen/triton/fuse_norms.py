"""Join RMS norms with the matrix products that read them, so that a product's own launches may norm its rows.

    linear(rms_norm(x, norm, eps), weight, bias)           ->  norm_linear(x, norm, eps, weight, bias)
    gated_linear(rms_norm(x, norm, eps), weight, bias, a)  ->  norm_gated_linear(x, norm, eps, weight, bias, a)
    quantized_linear(rms_norm(x, norm, eps), codes, …)     ->  norm_quantized_linear(x, codes, …, norm, eps), also gated
Must have: the product is the norm's only reader; x has rank 2, and is no fp16 where x·norm is an operand, which could
overflow; of quantized products, those that round x anyway.

Whether the product's kernel norms or a launch before it does is a choice of candidates (kernels/product_tiling.py).
This is part of lowering and no pass, because other targets have no such kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal

_llmc = torch.ops.llmc
_JOINED: dict[Any, Any] = {
    _llmc.linear.default: _llmc.norm_linear.default,
    _llmc.gated_linear.default: _llmc.norm_gated_linear.default,
}
_JOINED_CODES: dict[Any, Any] = {
    _llmc.quantized_linear.default: _llmc.norm_quantized_linear.default,
    _llmc.quantized_gated_linear.default: _llmc.norm_quantized_gated_linear.default,
}


@dataclass(frozen=True)
class JoinedNorms:
    """The graph with its norms joined, and why those that a product reads were left alone."""

    graph: ModelGraph
    refusals: tuple[Refusal, ...]


def fuse_norms(graph: ModelGraph) -> JoinedNorms:
    """A copy of the graph with the norms joined."""
    joined = graph.copy()
    refusals = []
    for norm in list(joined.graph.find_nodes(op="call_function", target=_llmc.rms_norm.default)):
        if any(reader.target in _JOINED or reader.target in _JOINED_CODES for reader in norm.users):
            refusal = _refusal(norm)
            if refusal is None:
                _join(joined.graph, norm)
            else:
                refusals.append(refusal)
    return JoinedNorms(joined, tuple(refusals))


def _refusal(norm: fx.Node) -> Refusal | None:
    reader, *others = norm.users
    value: torch.Tensor = norm.meta["val"]
    product = arguments_of(reader)
    if others:
        names = ", ".join(user.name for user in norm.users)
        return Refusal(f"its result has {len(norm.users)} readers: {names}", norm, users=tuple(norm.users))
    if value.dim() != 2:
        return Refusal(f"its rows have {value.dim() - 1} axes; products read rows of one", norm)
    if sum(argument is norm for argument in product.values()) != 1 or product["x"] is not norm:
        return Refusal(f"{reader.name} reads it as more than its x", norm, users=(reader,))
    if reader.target in _JOINED and value.dtype is torch.float16:
        return Refusal("x times the norm's weight may be more than fp16 holds before it is scaled", norm)
    if reader.target in _JOINED_CODES and product["x_format"] == "none":
        reason = (
            f"each program of {reader.name} would read the norm's weight, {4 * value.shape[1]} bytes in fp32, beside "
            f"rows of {product['format']} codes, which are fewer: that costs more than the launch it saves"
        )
        return Refusal(reason, norm, users=(reader,))
    return None


def _join(graph: fx.Graph, norm: fx.Node) -> None:
    (reader,) = norm.users
    given, product = arguments_of(norm), arguments_of(reader)
    x, weight, eps = given["x"], given["weight"], given["eps"]
    arguments: tuple[Any, ...]
    if reader.target in _JOINED_CODES:
        arguments = (x, *list(product.values())[1:], weight, eps)
    else:
        activation = (product["activation"],) if "activation" in product else ()
        arguments = (x, weight, eps, product["weight"], product["bias"], *activation)
    with graph.inserting_before(reader):
        node = graph.call_function({**_JOINED, **_JOINED_CODES}[reader.target], arguments)
    node.meta = dict(reader.meta)
    reader.replace_all_uses_with(node)
    graph.erase_node(reader)
    graph.erase_node(norm)
