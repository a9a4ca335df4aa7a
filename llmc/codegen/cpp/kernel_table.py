"""Which C++ kernel computes an llmc:: op, and the arguments that it is called with: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import llmc.ops  # noqa: F401  (registers the ops that the table names)
from llmc.cache_format import parse_cache_format
from llmc.codegen.call import Argument, Call, arguments_of
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.targets import CpuTarget

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Kernel:
    """function: name without the suffixes of element types, which are those of the tensor arguments `suffixes`.

    in_place: an argument that may lie where a result goes, and which result.
    """

    function: str | Callable[[Call], str]
    arguments: Callable[[Call], dict[str, Argument]]
    suffixes: tuple[str, ...] = ("x",)
    in_place: tuple[tuple[str, int], ...] = ()
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def supports(node: fx.Node, target: CpuTarget) -> Refusal | None:
    """Why the node's kernel cannot be called for it on the target, or None."""
    kernel = KERNELS.get(node.target)
    if kernel is None:
        return Refusal(f"no kernel for {target.name} computes {node.target}", node)
    given = arguments_of(node)
    tensors = {name: a.meta["val"] for name, a in given.items() if isinstance(a, fx.Node)}
    for name in kernel.suffixes:
        if suffix(given, name) is None:
            return Refusal(f"{name} is {tensors[name].dtype}; kernels know float32 and bfloat16", node)
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


def suffix(given: Mapping[str, Any], name: str) -> str | None:
    """How kernels' names say a tensor argument's element type, or what codes a cache holds; None for no kernel's."""
    dtype = given[name].meta["val"].dtype
    if dtype == torch.uint8 and given.get("cache_format") is not None:
        return parse_cache_format(given["cache_format"]).codes
    return SUFFIXES.get(dtype)


def _cache_refusal(node: fx.Node, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> Refusal | None:
    heads = [tensors[name].shape[2] for name in ("q", "k", "v") if name in tensors]
    widest = max(*heads, given.get("value_dim") or 0)
    if widest > _CODED_HEAD:
        return Refusal(f"heads have {widest} channels; kernels put {_CODED_HEAD} at most into codes", node)
    return None


def _codes_refusal(node: fx.Node, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> Refusal | None:
    format, x_format = given["format"], given.get("x_format", "none")
    if x_format not in _X_FORMATS[format]:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if tensors["scales"].dtype not in _SCALES:
        return Refusal(f"scales are {tensors['scales'].dtype}; kernels know {', '.join(map(str, _SCALES))}", node)
    columns, groups = tensors["codes"].shape[1], tensors["scales"].shape[1]
    if groups > 1 and columns // groups % 16:
        return Refusal(f"groups are of {columns // groups} columns; kernels know multiples of 16, or one a row", node)
    if given.get("dtype", torch.float32) not in SUFFIXES:
        return Refusal(f"the result is {given['dtype']}; kernels know float32 and bfloat16", node)
    return None


SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_CODED_HEAD = 1024  # LLMC_CODED_HEAD
_SCALES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# What activations of products with weights of a format can be rounded to.
_X_FORMATS = {
    "int8": ("none", "int8"),
    "int4": ("none", "int8"),
    "fp8": ("none", "fp8"),
    "nf4": ("none",),
    "mxfp4": ("none",),
}


def _product(call: Call, layout: Layout) -> dict[str, Argument]:
    out, channels = call.shape("weight")
    return {
        "tokens": call.count("x"),
        "in": channels,
        "out": out // 2 if layout is Layout.GATED_PANELS else out,
        "x": call.rows("x"),
        "weight": call.weight("weight", layout),
        "bias": call.vector("bias"),
    }


def _linear(call: Call) -> dict[str, Argument]:
    return _product(call, Layout.PANELS) | {"y": call.result(), "activation": "identity", "scale": 1.0}


def _fused_linear(call: Call) -> dict[str, Argument]:
    return _product(call, Layout.PANELS) | {
        "residual": call.rows("residual"),
        "y": call.result(),
        "activation": call.plain("activation"),
        "scale": call.plain("scale"),
    }


def _gated_linear(call: Call) -> dict[str, Argument]:
    product = _product(call, Layout.GATED_PANELS)
    return product | {"y": call.result(), "activation": call.plain("activation"), "scale": 1.0}


def _codes(call: Call) -> dict[str, Argument]:
    return {
        "format": call.plain("format"),
        "scale_type": _SCALES[call.dtype("scales")],
        "has_zeros": call.plain("zeros") is not None,
    }


def _quantized_product(call: Call, layout: Layout) -> dict[str, Argument]:
    out, channels = call.shape("codes")
    return {
        "tokens": call.count("x"),
        "in": channels,
        "out": out // 2 if layout is Layout.GATED_CODE_PANELS else out,
        "group": channels // call.shape("scales")[1],
        "x": call.rows("x"),
        "weight": call.code_panels(layout),
        "x_scale": call.vector("x_scale"),
        "bias": call.vector("bias"),
        "y": call.result(),
        "activation": "identity",
        "scale": 1.0,
        "x_format": call.plain("x_format"),
    } | _codes(call)


def _quantized_linear(call: Call) -> dict[str, Argument]:
    fused: dict[str, Argument] = {
        "residual": call.rows("residual"),
        "activation": call.plain("activation"),
        "scale": call.plain("scale"),
    }
    return _in_order(_quantized_product(call, Layout.CODE_PANELS) | fused, _QUANTIZED_FIELDS)


def _quantized_gated_linear(call: Call) -> dict[str, Argument]:
    product = _quantized_product(call, Layout.GATED_CODE_PANELS) | {"activation": call.plain("activation")}
    return _in_order(product, _QUANTIZED_FIELDS)


def _quantized_lm_head(call: Call) -> dict[str, Argument]:
    return _in_order(_quantized_product(call, Layout.CODE_PANELS), _QUANTIZED_FIELDS)


def _quantized_embedding(call: Call) -> dict[str, Argument]:
    channels = call.shape("codes")[1]
    return {
        "tokens": call.count("ids"),
        "channels": channels,
        "group": channels // call.shape("scales")[1],
        "ids": call.vector("ids"),
        "weight": call.code_panels(Layout.CODE_PANELS),
        "y": call.result(),
    } | _codes(call)


def _quantized_embedding_function(call: Call) -> str:
    return f"llmc_quantized_embedding_{SUFFIXES[call.plain('dtype')]}"


def _embedding(call: Call) -> dict[str, Argument]:
    return {
        "tokens": call.count("ids"),
        "channels": call.shape("weight")[1],
        "ids": call.vector("ids"),
        "weight": call.weight("weight", call.table("weight")),
        "y": call.result(),
    }


def _embedding_function(call: Call) -> str:
    return "llmc_embedding_panels" if call.table("weight") is Layout.PANELS else "llmc_embedding"


def _select_rows(call: Call) -> dict[str, Argument]:
    return {
        "selected": call.count("rows"),
        "channels": _columns(call, "x"),
        "rows": call.vector("rows"),
        "x": call.rows("x"),
        "y": call.result(),
    }


def _select_channels(call: Call) -> dict[str, Argument]:
    return {
        "tokens": call.count("x"),
        "channels": call.shape("order")[0],
        "order": call.weight("order", Layout.ROWS),
        "x": call.rows("x"),
        "y": call.result(),
    }


def _norm(call: Call) -> dict[str, Argument]:
    *groups, channels = call.shape("x")
    return {
        "tokens": call.count("x"),
        "groups": groups[0] if groups else 1,
        "channels": channels,
        "x": call.rows("x"),
        "weight": call.vector("weight"),
    }


def _rms_norm(call: Call) -> dict[str, Argument]:
    return _norm(call) | {"eps": call.plain("eps"), "y": call.result()}


def _layer_norm(call: Call) -> dict[str, Argument]:
    return _norm(call) | {"bias": call.vector("bias"), "eps": call.plain("eps"), "y": call.result()}


def _add_rms_norm(call: Call) -> dict[str, Argument]:
    return _in_order(_rms_norm(call) | {"residual": call.rows("residual"), "sum": call.result(1)}, _NORM_FIELDS)


def _add_layer_norm(call: Call) -> dict[str, Argument]:
    return _in_order(_layer_norm(call) | {"residual": call.rows("residual"), "sum": call.result(1)}, _NORM_FIELDS)


def _gated_activation(call: Call) -> dict[str, Argument]:
    return {
        "tokens": call.count("gate"),
        "channels": _columns(call, "gate"),
        "gate": call.rows("gate"),
        "up": call.rows("up"),
        "y": call.result(),
        "activation": call.plain("activation"),
    }


def _rope_angles(call: Call) -> dict[str, Argument]:
    return {
        "tokens": call.count("positions"),
        "half": call.shape("inv_freq")[0],
        "positions": call.vector("positions"),
        "inv_freq": call.vector("inv_freq"),
        "scale": call.plain("scale"),
        "cos": call.result(0).partition("/")[0],
        "sin": call.result(1).partition("/")[0],
    }


def _rope(call: Call) -> dict[str, Argument]:
    heads, head_dim = call.shape("x")
    return {
        "tokens": call.count("x"),
        "heads": heads,
        "head_dim": head_dim,
        "half": call.shape("cos")[0],
        "interleaved": call.plain("interleaved"),
        "x": call.rows("x"),
        "cos": call.vector("cos"),
        "sin": call.vector("sin"),
        "y": call.result(),
    }


def _kv_write(call: Call) -> dict[str, Argument]:
    kv_heads, head_dim = call.shape("k")
    return {
        "tokens": call.count("k"),
        "heads": 0,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": call.shape("v")[1],
        "half": 0,
        "block_size": call.block_size(),
        "k": call.rows("k"),
        "v": call.rows("v"),
        "k_cache": call.cache("k_cache"),
        "v_cache": call.cache("v_cache"),
        "slot_mapping": call.vector("slot_mapping"),
        "cache_group": _cache_group(call),
    }


def _cache_group(call: Call) -> int | None:
    """Channels that share a scale in a cache of codes; None for all of a head's, and for plain caches."""
    format = call.plain("cache_format")
    return None if format is None else parse_cache_format(format).group


def _rope_kv_write(call: Call) -> dict[str, Argument]:
    rotation: dict[str, Argument] = {
        "heads": call.shape("q")[0],
        "half": call.shape("cos")[0],
        "interleaved": call.plain("interleaved"),
        "q": call.rows("q"),
        "cos": call.vector("cos"),
        "sin": call.vector("sin"),
        "q_out": call.result(),
    }
    return _in_order(_kv_write(call) | rotation, _KV_WRITE_FIELDS)


def _paged_attention(call: Call) -> dict[str, Argument]:
    heads, head_dim = call.shape("q")
    kv_heads, _, _ = call.shape("k_cache")
    return {
        "tokens": call.count("q"),
        "requests": "R",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": call.plain("value_dim") or call.shape("v_cache")[2],
        "block_size": call.block_size(),
        "q": call.rows("q"),
        "k_cache": call.cache("k_cache"),
        "v_cache": call.cache("v_cache"),
        "query_starts": call.vector("query_starts"),
        "context_lens": call.vector("context_lens"),
        "block_tables": call.vector("block_tables"),
        "max_blocks": "max_blocks",
        "scale": call.plain("scale"),
        "window": call.plain("window") or 0,
        "softcap": call.plain("softcap") or 0.0,
        "sinks": call.vector("sinks"),
        "y": call.result(),
        "cache_group": _cache_group(call),
    }


def _columns(call: Call, name: str) -> int:
    columns = 1
    for size in call.shape(name):
        columns *= size
    return columns


def _in_order(arguments: dict[str, Argument], fields: str) -> dict[str, Argument]:
    """The struct's fields in the order of their declaration, which C++ asks for."""
    return {name: arguments[name] for name in fields.split() if name in arguments}


_NORM_FIELDS = "tokens groups channels x residual weight bias eps y sum"
_KV_WRITE_FIELDS = (
    "tokens heads kv_heads head_dim value_dim half block_size interleaved q k v cos sin k_cache v_cache "
    "slot_mapping q_out cache_group"
)
_QUANTIZED_FIELDS = (
    "tokens in out group x weight x_scale bias residual y activation scale format x_format scale_type has_zeros"
)
_MATRIX = {"x": (2,), "weight": (2,)}
_CODES = {"x": (2,), "codes": (2,)}
_NORMS = frozenset({_llmc.rms_norm.default, _llmc.layer_norm.default}) | frozenset(
    {_llmc.add_rms_norm.default, _llmc.add_layer_norm.default}
)

KERNELS: dict[Any, Kernel] = {
    _llmc.linear.default: Kernel("llmc_linear", _linear, ranks=_MATRIX),
    _llmc.fused_linear.default: Kernel("llmc_linear", _fused_linear, ranks=_MATRIX),
    _llmc.gated_linear.default: Kernel("llmc_gated_linear", _gated_linear, ranks=_MATRIX),
    _llmc.lm_head.default: Kernel("llmc_lm_head", _linear, ranks=_MATRIX),
    _llmc.embedding.default: Kernel(_embedding_function, _embedding, ("weight",), ranks={"ids": (1,)}),
    _llmc.quantized_linear.default: Kernel("llmc_quantized_linear", _quantized_linear, ranks=_CODES),
    _llmc.quantized_gated_linear.default: Kernel("llmc_quantized_gated_linear", _quantized_gated_linear, ranks=_CODES),
    _llmc.quantized_lm_head.default: Kernel("llmc_quantized_lm_head", _quantized_lm_head, ranks=_CODES),
    _llmc.quantized_embedding.default: Kernel(
        _quantized_embedding_function, _quantized_embedding, (), ranks={"ids": (1,)}
    ),
    _llmc.select_rows.default: Kernel("llmc_select_rows", _select_rows),
    _llmc.select_channels.default: Kernel("llmc_select_channels", _select_channels, ranks={"x": (2,), "order": (1,)}),
    _llmc.rms_norm.default: Kernel("llmc_rms_norm", _rms_norm, ranks={"x": (2, 3)}),
    _llmc.layer_norm.default: Kernel("llmc_layer_norm", _layer_norm, ranks={"x": (2, 3)}),
    _llmc.add_rms_norm.default: Kernel("llmc_rms_norm", _add_rms_norm, ranks={"x": (2,)}),
    _llmc.add_layer_norm.default: Kernel("llmc_layer_norm", _add_layer_norm, ranks={"x": (2,)}),
    _llmc.gated_activation.default: Kernel("llmc_gated_activation", _gated_activation, ("gate",)),
    _llmc.rope_angles.default: Kernel("llmc_rope_angles", _rope_angles, (), ranks={"positions": (1,)}),
    _llmc.rope.default: Kernel("llmc_rope", _rope, in_place=(("x", 0),), ranks={"x": (3,)}),
    _llmc.kv_write.default: Kernel("llmc_kv_write", _kv_write, ("k", "k_cache"), ranks={"k": (3,), "v": (3,)}),
    _llmc.rope_kv_write.default: Kernel(
        "llmc_kv_write", _rope_kv_write, ("q", "k_cache"), in_place=(("q", 0),), ranks={"q": (3,), "k": (3,), "v": (3,)}
    ),
    _llmc.paged_attention.default: Kernel(
        "llmc_paged_attention", _paged_attention, ("q", "k_cache"), ranks={"q": (3,), "k_cache": (4,)}
    ),
}
