"""How routers and drafts choose: llmc::top_k, take_channels, mark_channels and top_tokens."""

from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import Body, Value

llmc = torch.ops.llmc


def top_k(b: Body, x: Value, count: int) -> tuple[str, ...]:
    """TopK, which takes the lower of equals first."""
    return b.several("TopK", 2, x, b.integers([count]), axis=-1)


def take_channels(b: Body, x: Value, index: Value) -> str:
    """x[..., index]."""
    return b("GatherElements", x, b.cast(index, torch.int64), axis=-1)


def mark_channels(b: Body, index: Value, channels: int) -> str:
    """True at the index of each channel."""
    leading = b("Shape", index, end=-1)
    zeros = b("Expand", b.integer(0), b("Concat", leading, b.integers([channels]), axis=0))
    ones = b("Expand", b.integer(1), b("Shape", index))
    marked = b("ScatterElements", zeros, b.cast(index, torch.int64), ones, axis=-1)
    return b("Cast", marked, to=TensorProto.BOOL)


def top_tokens(b: Body, logits: Value, count: int, token_map: Value | None) -> tuple[str, str]:
    """TopK of logits, less the logarithm of their sum of exponentials."""
    values, places = b.several("TopK", 2, logits, b.integers([count]), axis=-1)
    logprobs = b("Sub", values, b("ReduceLogSumExp", logits, b.constant(np.array([-1])), keepdims=1))
    tokens = places if token_map is None else b("Gather", token_map, places, axis=0)
    return b("Cast", tokens, to=TensorProto.INT32), logprobs


FUNCTIONS: dict[Any, Any] = {
    llmc.top_k.default: top_k,
    llmc.take_channels.default: take_channels,
    llmc.mark_channels.default: mark_channels,
    llmc.top_tokens.default: top_tokens,
}
