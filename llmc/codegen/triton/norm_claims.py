"""Fusions into GPU launches, in addition to those of products: a product fuses the RMS norm before it and may norm its
rows on the way, and a norm fuses the sum over ranks before it, so that the ranks' rows are read once.

    linear(rms_norm(x, norm, eps), weight, bias), gated_linear(…)       in the product's kernel, or in a launch before
    linear(round_tokens(rms_norm(x, norm, eps), …), dequantize(…), …)   where x is rounded
Must have: the product is the norm's only reader, except adapters that add to it and compute the norm themselves; x has
rank 2; x is not fp16 where x·norm is an operand, which could overflow; if weights are codes, the product rounds x
anyway.

    rms_norm(all_reduce(x)), add_rms_norm(residual, all_reduce(x)), …   in the launch that sums
Must have: the norm is the sum's only reader, and its rows are short enough for one program.

Whether the product's kernel norms or a launch before it does is a choice of candidates (products/dense_ways.py).
"""

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.codegen.triton.kernel_table import KERNELS
from llmc.codegen.triton.kernels.ranks.reduce_ways import LONGEST_NORMED_ROW
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal

_llmc = torch.ops.llmc
_NORMS = (
    _llmc.rms_norm.default,
    _llmc.add_rms_norm.default,
    _llmc.layer_norm.default,
    _llmc.add_layer_norm.default,
)


def taken_in(node: fx.Node) -> fx.Node | Refusal | None:
    """The node that `node` fuses, or why it does not fuse its input; None if there is nothing to fuse."""
    if node.target is _llmc.lora.default:
        return _norm_of_product(node)
    return _sum_before(node) if node.target in _NORMS else norm_before(node)


def _norm_of_product(lora: fx.Node) -> fx.Node | None:
    """The norm of the adapters' input, if the product to which they add fuses it."""
    norms = (norm_before(user) for user in lora.users if arguments_of(user).get("delta") is lora)
    return next((norm for norm in norms if norm is arguments_of(lora)["x"]), None)


def _sum_before(norm: fx.Node) -> fx.Node | Refusal | None:
    """The sum over ranks of either summand, or why it is not fused."""
    arguments = arguments_of(norm)
    sums = [_taken_sum(arguments[name]) for name in ("residual", "x") if name in arguments]
    total = next((term for term in sums if isinstance(term, fx.Node)), None)
    return total or next((term for term in sums if term is not None), None)


def _taken_sum(total: fx.Node) -> fx.Node | Refusal | None:
    if total.target is not _llmc.all_reduce.default:
        return None
    value: torch.Tensor = total.meta["val"]
    if len(total.users) > 1:
        names = ", ".join(user.name for user in total.users)
        return Refusal(f"its result has {len(total.users)} readers: {names}", total, users=tuple(total.users))
    if value.dim() != 2 or int(value.shape[-1]) > LONGEST_NORMED_ROW:
        return Refusal(f"its rows are {list(value.shape[1:])}; a program norms up to {LONGEST_NORMED_ROW}", total)
    return total


def norm_before(product: fx.Node) -> fx.Node | Refusal | None:
    """The norm that a product takes in, or why it leaves the one before it; None if there is none to take in."""
    parts = unrounded_parts(product)
    template = KERNELS.get(product.target)
    if template is None or (parts["weight"].target if "weight" in parts else None) not in template.normed:
        return None
    norm, arrived, weight = x_of(product), parts.get("x"), parts.get("weight")
    if norm.target is not _llmc.rms_norm.default:
        return None
    value: torch.Tensor = norm.meta["val"]
    read = (r for user in norm.users for r in (user.users if user is arrived else (user,)))
    readers = dict.fromkeys(reader for reader in read if reader is not arguments_of(product).get("delta"))
    if len(readers) > 1:
        names = ", ".join(user.name for user in readers)
        return Refusal(f"its result has {len(readers)} readers: {names}", norm, users=tuple(readers))
    if value.dim() != 2:
        return Refusal(f"its rows have {value.dim() - 1} axes; products read rows of one", norm)
    if any(argument is norm for name, argument in arguments_of(product).items() if name != "x"):
        return Refusal(f"{product.name} reads it as more than its x", norm, users=(product,))
    has_codes = weight is not None and weight.target is not _llmc.sparse_bitmask.default
    if not has_codes and value.dtype is torch.float16:
        return Refusal("x times the norm's weight may be more than fp16 holds before it is scaled", norm)
    if weight is not None and has_codes and arrived is None:
        reason = (
            f"each program of {product.name} would read the norm's weight, {4 * value.shape[1]} bytes in fp32, for few "
            f"rows of {arguments_of(weight)['format']} codes: that costs more than the launch it saves"
        )
        return Refusal(reason, norm, users=(product,))
    return norm
