"""The arguments that C++ kernels are called with, from a call of their op: fields of the structs in kernels/api.h."""

from __future__ import annotations

import torch

from llmc.codegen.call import Call
from llmc.formats.cache_format import parse_cache_format
from llmc.program import Layout
from llmc.program.launch_arguments import Argument, Count

# Element types of activations and weights, and of scales.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
SCALES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def select_rows(call: Call) -> dict[str, Argument]:
    """llmc::select_rows."""
    return {
        "selected": call.count("rows"),
        "channels": _columns(call, "x"),
        "rows": call.vector("rows"),
        "x": call.rows("x"),
        "y": call.result(),
    }


def select_channels(call: Call) -> dict[str, Argument]:
    """llmc::select_channels."""
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


def rms_norm(call: Call) -> dict[str, Argument]:
    """llmc::rms_norm."""
    return _norm(call) | {"eps": call.plain("eps"), "y": call.result()}


def layer_norm(call: Call) -> dict[str, Argument]:
    """llmc::layer_norm."""
    return _norm(call) | {"bias": call.vector("bias"), "eps": call.plain("eps"), "y": call.result()}


def add_rms_norm(call: Call) -> dict[str, Argument]:
    """llmc::add_rms_norm."""
    return rms_norm(call) | {"residual": call.rows("residual"), "sum": call.result(1)}


def add_layer_norm(call: Call) -> dict[str, Argument]:
    """llmc::add_layer_norm."""
    return layer_norm(call) | {"residual": call.rows("residual"), "sum": call.result(1)}


def gated_activation(call: Call) -> dict[str, Argument]:
    """llmc::gated_activation."""
    return {
        "tokens": call.count("gate"),
        "channels": _columns(call, "gate"),
        "gate": call.rows("gate"),
        "up": call.rows("up"),
        "y": call.result(),
        "activation": call.plain("activation"),
    }


def rope_angles(call: Call) -> dict[str, Argument]:
    """llmc::rope_angles."""
    return {
        "tokens": call.count("positions"),
        "half": call.shape("inv_freq")[0],
        "positions": call.vector("positions"),
        "inv_freq": call.vector("inv_freq"),
        "scale": call.plain("scale"),
        "cos": call.result(0).pointer,
        "sin": call.result(1).pointer,
    }


def rope(call: Call) -> dict[str, Argument]:
    """llmc::rope."""
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


def kv_write(call: Call) -> dict[str, Argument]:
    """llmc::kv_write."""
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


def rope_kv_write(call: Call) -> dict[str, Argument]:
    """llmc::rope_kv_write."""
    rotation: dict[str, Argument] = {
        "heads": call.shape("q")[0],
        "half": call.shape("cos")[0],
        "interleaved": call.plain("interleaved"),
        "q": call.rows("q"),
        "cos": call.vector("cos"),
        "sin": call.vector("sin"),
        "q_out": call.result(),
    }
    return kv_write(call) | rotation


def paged_attention(call: Call) -> dict[str, Argument]:
    """llmc::paged_attention."""
    heads, head_dim = call.shape("q")
    kv_heads, _, _ = call.shape("k_cache")
    return {
        "tokens": call.count("q"),
        "requests": Count.REQUESTS,
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
        "max_blocks": Count.MAX_BLOCKS,
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
