"""Which RMS norms products' own launches take in on GPUs, so that they may norm their rows on the way.

    linear(rms_norm(x, norm, eps), weight, bias), gated_linear(…)       in the product's kernel, or in a launch before
    linear(round_tokens(rms_norm(x, norm, eps), …), dequantize(…), …)   where x is rounded
Must have: the product is the norm's only reader; x has rank 2, and is no fp16 where x·norm is an operand, which could
overflow; of weights that are codes, products that round x anyway.

Whether the product's kernel norms or a launch before it does is a choice of candidates (products/dense_ways.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal

_llmc = torch.ops.llmc
# Products that may take in a norm, by the op that yields their weight; None for a dense one.
_NORMED: Mapping[Any, tuple[Any, ...]] = MappingProxyType(
    {
        None: (_llmc.linear.default, _llmc.gated_linear.default),
        _llmc.dequantize.default: (_llmc.linear.default, _llmc.fused_linear.default, _llmc.gated_linear.default),
    }
)


def norm_before(product: fx.Node) -> fx.Node | Refusal | None:
    """The norm that a product takes in, or why it leaves the one before it; None if there is none to take in."""
    parts = unrounded_parts(product)
    if product.target not in _NORMED.get(parts["weight"].target if "weight" in parts else None, ()):
        return None
    norm, arrived, weight = x_of(product), parts.get("x"), parts.get("weight")
    if norm.target is not _llmc.rms_norm.default:
        return None
    value: torch.Tensor = norm.meta["val"]
    readers = dict.fromkeys(r for user in norm.users for r in (user.users if user is arrived else (user,)))
    if len(readers) > 1:
        names = ", ".join(user.name for user in readers)
        return Refusal(f"its result has {len(readers)} readers: {names}", norm, users=tuple(readers))
    if value.dim() != 2:
        return Refusal(f"its rows have {value.dim() - 1} axes; products read rows of one", norm)
    if any(argument is norm for name, argument in arguments_of(product).items() if name != "x"):
        return Refusal(f"{product.name} reads it as more than its x", norm, users=(product,))
    if weight is None and value.dtype is torch.float16:
        return Refusal("x times the norm's weight may be more than fp16 holds before it is scaled", norm)
    if weight is not None and arrived is None:
        reason = (
            f"each program of {product.name} would read the norm's weight, {4 * value.shape[1]} bytes in fp32, beside "
            f"rows of {arguments_of(weight)['format']} codes, which are fewer: that costs more than the launch it saves"
        )
        return Refusal(reason, norm, users=(product,))
    return norm
