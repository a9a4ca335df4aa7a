"""Which C++ kernel computes an llmc:: op, and with which arguments: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import llmc.ops  # noqa: F401  (registers the ops that the table names)
from llmc.codegen.backend import no_kernel
from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp import kernel_arguments as arguments
from llmc.codegen.cpp import products
from llmc.codegen.cpp.kernel_arguments import DTYPES
from llmc.formats.cache_format import parse_cache_format
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import CpuTarget

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Kernel:
    """family: of functions, one for each combination of the element types that the arguments `typed` can have.

    in_place: an argument that may lie where a result goes, and which result. dtypes, refusal: of products and lookups,
    whose element types and limits depend on the nodes before them, too.
    """

    family: str | Callable[[Call], str]
    arguments: Callable[[Call], dict[str, Argument]]
    typed: tuple[str, ...] = ("x",)
    in_place: tuple[tuple[str, int], ...] = ()
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Callable[[Call], tuple[str, ...]] | None = None
    refusal: Callable[[fx.Node, CpuTarget], Refusal | None] | None = None


def supports(node: fx.Node, target: CpuTarget) -> Refusal | None:
    """Why the node's kernel cannot be called for it on the target, or None."""
    kernel = KERNELS.get(node.target)
    if kernel is None:
        return no_kernel(node, target.name)
    if kernel.refusal is not None:
        return kernel.refusal(node, target)
    given = arguments_of(node)
    tensors = {name: a.meta["val"] for name, a in given.items() if isinstance(a, fx.Node)}
    for name in kernel.typed:
        if element_type(given[name], given.get("cache_format")) is None:
            dtype = tensors[name].dtype if name in tensors else given[name]
            return Refusal(f"{name} is {dtype}; kernels know float32 and bfloat16", node)
    if given.get("cache_format") is not None:
        return _cache_refusal(node, given, tensors)
    for name, ranks in kernel.ranks.items():
        if tensors[name].dim() not in ranks:
            return Refusal(f"{name} has shape {list(tensors[name].shape)}; the kernel takes rank {ranks}", node)
    return None


def element_type(argument: fx.Node | torch.dtype, cache_format: str | None) -> str | None:
    """What a launch says of a tensor's elements, or of a cache's codes; None for what no kernel takes."""
    dtype = argument.meta["val"].dtype if isinstance(argument, fx.Node) else argument
    if dtype == torch.uint8 and cache_format is not None:
        return parse_cache_format(cache_format).codes
    return DTYPES.get(dtype)


def _cache_refusal(node: fx.Node, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> Refusal | None:
    heads = [tensors[name].shape[2] for name in ("q", "k", "v") if name in tensors]
    widest = max(*heads, given.get("value_dim") or 0)
    if widest > CODED_HEAD:
        return Refusal(f"heads have {widest} channels; kernels put {CODED_HEAD} at most into codes", node)
    return None


CODED_HEAD = 1024  # LLMC_CODED_HEAD


def _product(name: str, fields: Callable[[Call], dict[str, Argument]]) -> Kernel:
    family = products.product_family(name)
    return Kernel(family, fields, (), dtypes=products.element_types, refusal=products.refusal)


KERNELS: dict[Any, Kernel] = {
    _llmc.linear.default: _product("linear", products.linear),
    _llmc.fused_linear.default: _product("linear", products.fused_linear),
    _llmc.gated_linear.default: _product("gated_linear", products.gated_linear),
    _llmc.lm_head.default: _product("lm_head", products.linear),
    _llmc.embedding.default: Kernel(
        products.embedding_family, products.embedding, (), dtypes=products.element_types, refusal=products.refusal
    ),
    _llmc.select_rows.default: Kernel("select_rows", arguments.select_rows),
    _llmc.select_channels.default: Kernel(
        "select_channels", arguments.select_channels, ranks={"x": (2,), "order": (1,)}
    ),
    _llmc.rms_norm.default: Kernel("rms_norm", arguments.rms_norm, ranks={"x": (2, 3)}),
    _llmc.layer_norm.default: Kernel("layer_norm", arguments.layer_norm, ranks={"x": (2, 3)}),
    _llmc.add_rms_norm.default: Kernel("rms_norm", arguments.add_rms_norm, ranks={"x": (2,)}),
    _llmc.add_layer_norm.default: Kernel("layer_norm", arguments.add_layer_norm, ranks={"x": (2,)}),
    _llmc.gated_activation.default: Kernel("gated_activation", arguments.gated_activation, ("gate",)),
    _llmc.rope_angles.default: Kernel("rope_angles", arguments.rope_angles, (), ranks={"positions": (1,)}),
    _llmc.rope.default: Kernel("rope", arguments.rope, in_place=(("x", 0),), ranks={"x": (3,)}),
    _llmc.kv_write.default: Kernel("kv_write", arguments.kv_write, ("k", "k_cache"), ranks={"k": (3,), "v": (3,)}),
    _llmc.rope_kv_write.default: Kernel(
        "kv_write",
        arguments.rope_kv_write,
        ("q", "k_cache"),
        in_place=(("q", 0),),
        ranks={"q": (3,), "k": (3,), "v": (3,)},
    ),
    _llmc.paged_attention.default: Kernel(
        "paged_attention", arguments.paged_attention, ("q", "k_cache"), ranks={"q": (3,), "k_cache": (4,)}
    ),
}
