"""Which C++ kernel computes an llmc:: op, and with which arguments: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import llmc.ops  # noqa: F401  (registers the ops that the table names)
from llmc.cache_format import parse_cache_format
from llmc.code_format import CODE_FORMATS
from llmc.codegen.backend import no_kernel
from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp import kernel_arguments as arguments
from llmc.codegen.cpp.kernel_arguments import DTYPES, SCALES
from llmc.graph.refusal import Refusal
from llmc.launch_arguments import Argument
from llmc.targets import CpuTarget

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Kernel:
    """family: of functions, one for each combination of the element types that the arguments `typed` can have.

    in_place: an argument that may lie where a result goes, and which result.
    """

    family: str | Callable[[Call], str]
    arguments: Callable[[Call], dict[str, Argument]]
    typed: tuple[str, ...] = ("x",)
    in_place: tuple[tuple[str, int], ...] = ()
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def supports(node: fx.Node, target: CpuTarget) -> Refusal | None:
    """Why the node's kernel cannot be called for it on the target, or None."""
    kernel = KERNELS.get(node.target)
    if kernel is None:
        return no_kernel(node, target.name)
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
    if "codes" in tensors:
        return _codes_refusal(node, given, tensors)
    x, weight = tensors.get("x"), tensors.get("weight")
    if node.target in _NORMS or x is None or weight is None:
        return None
    if weight.dtype.itemsize > x.dtype.itemsize:
        return Refusal(f"the weight is {weight.dtype} but x is {x.dtype}: packing it would lose digits", node)
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


def _codes_refusal(node: fx.Node, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> Refusal | None:
    format, x_format = given["format"], given.get("x_format", "none")
    if x_format not in CODE_FORMATS[format].activations:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if tensors["scales"].dtype not in SCALES:
        return Refusal(f"scales are {tensors['scales'].dtype}; kernels know {', '.join(map(str, SCALES))}", node)
    columns, groups = tensors["codes"].shape[1], tensors["scales"].shape[1]
    if groups > 1 and columns // groups % 16:
        return Refusal(f"groups are of {columns // groups} columns; kernels know multiples of 16, or one a row", node)
    return None


CODED_HEAD = 1024  # LLMCCODED_HEAD


_MATRIX = {"x": (2,), "weight": (2,)}
_CODES = {"x": (2,), "codes": (2,)}
_NORMS = frozenset({_llmc.rms_norm.default, _llmc.layer_norm.default}) | frozenset(
    {_llmc.add_rms_norm.default, _llmc.add_layer_norm.default}
)

KERNELS: dict[Any, Kernel] = {
    _llmc.linear.default: Kernel("linear", arguments.linear, ranks=_MATRIX),
    _llmc.fused_linear.default: Kernel("linear", arguments.fused_linear, ranks=_MATRIX),
    _llmc.gated_linear.default: Kernel("gated_linear", arguments.gated_linear, ranks=_MATRIX),
    _llmc.lm_head.default: Kernel("lm_head", arguments.linear, ranks=_MATRIX),
    _llmc.embedding.default: Kernel(arguments.embedding_family, arguments.embedding, ("weight",), ranks={"ids": (1,)}),
    _llmc.quantized_linear.default: Kernel("quantized_linear", arguments.quantized_linear, ranks=_CODES),
    _llmc.quantized_gated_linear.default: Kernel(
        "quantized_gated_linear", arguments.quantized_gated_linear, ranks=_CODES
    ),
    _llmc.quantized_lm_head.default: Kernel("quantized_lm_head", arguments.quantized_lm_head, ranks=_CODES),
    _llmc.quantized_embedding.default: Kernel(
        "quantized_embedding", arguments.quantized_embedding, ("dtype",), ranks={"ids": (1,)}
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
