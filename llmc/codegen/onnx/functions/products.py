"""Matrix products: llmc::linear, its fused forms, llmc::lm_head, and products with experts."""

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import Body, InnerBody, Value
from llmc.codegen.onnx.functions.activations import activation as activated

llmc = torch.ops.llmc


def product(b: Body, x: Value, weight: Value, bias: Value | None) -> str:
    """x·weightᵀ + bias: Gemm for a matrix, MatMul for more axes. Where weights are computed, that of a single row would
    have other bits: one more is multiplied."""
    if len(x.shape) == 2 and weight.is_decoded:
        return b.slice(b("Gemm", _with_a_row_of_zeros(b, x), weight, bias, transB=1), 0, 0, -1)
    if len(x.shape) == 2:
        return b("Gemm", x, weight, bias, transB=1)
    y = b("MatMul", x, b.transpose(weight, 1, 0))
    return y if bias is None else b("Add", y, bias)


def head_linear(b: Body, x: Value, weight: Value) -> str:
    """Compute one product per head, over all tokens and an additional one: a product of a single row would have other
    bits."""
    rows = b.transpose(_with_a_row_of_zeros(b, x), 1, 0, 2)
    return b.slice(b.transpose(b("MatMul", rows, b.transpose(weight, 0, 2, 1)), 1, 0, 2), 0, 0, -1)


def _with_a_row_of_zeros(b: Body, x: Value) -> str:
    shape = [1, *(x.size(axis) for axis in range(1, len(x.shape)))]
    return b("Concat", x, b.constant(np.zeros(shape, np.float32)), axis=0)


def fused_linear(
    b: Body, x: Value, weight: Value, bias: Value | None, residual: Value | None, activation: str, scale: float
) -> str:
    """activation(x·weightᵀ + bias)·scale + residual."""
    y = product(b, x, weight, bias)
    y = y if activation == "identity" else activated(b, y, activation)
    y = y if scale == 1 else b("Mul", y, b.number(scale))
    return y if residual is None else b("Add", y, residual)


def gated_linear(b: Body, x: Value, weight: Value, bias: Value | None, activation: str) -> str:
    """activation of the first half of the channels times the second half."""
    gate, up = b.several("Split", 2, product(b, x, weight, bias), axis=len(x.shape) - 1, num_outputs=2)
    return b("Mul", activated(b, gate, activation), up)


def expert_linear(b: Body, x: Value, weight: Value, bias: Value | None, index: Value, experts: int) -> str:
    """A loop over the experts that any token is sent to. Each multiplies all rows and keeps its own: a row's bits then
    do not depend on where its neighbours go. One token more is sent nowhere, so that no product is of a single row,
    which would have other bits."""
    channels, slots = weight.size(0) // experts, index.size(1)
    ids = b("Concat", b.cast(index, torch.int64), b.constant(np.full((1, slots), -1)), axis=0)
    (used,) = b.several("Unique", 1, ids)
    is_expert = b("And", b("GreaterOrEqual", used, b.integer(0)), b("Less", used, b.integer(experts)))
    used = b("Compress", used, is_expert, axis=0)
    weights = b.reshape(weight, experts, channels, -1)
    biases = None if bias is None else b.reshape(bias, experts, channels)
    shape = b("Concat", b.length(ids, 0), b.integers([slots, channels]), axis=0)
    zeros = b("Expand", b.number(0.0), shape)
    rows = b.reshape(_with_a_row_of_zeros(b, x), -1, x.size(-1))
    # A token has one row for all its slots, or one for each.
    loop = _expert_loop(rows, 1 if len(x.shape) == 2 else slots, ids, used, weights, biases)
    return b.slice(b("Loop", b.squeeze(b.length(used, 0), 0), None, zeros, body=loop), 0, 0, -1)


def _expert_loop(rows: str, slots: int, ids: str, used: str, weights: str, biases: str | None) -> onnx.GraphProto:
    """y = where(ids == expert, rows·weightᵀ + bias, y), for each expert that is used."""
    inner = InnerBody()
    expert = inner("Gather", used, "round", axis=0)
    bias = None if biases is None else inner("Gather", biases, expert, axis=0)
    flat = inner("Gemm", rows, inner("Gather", weights, expert, axis=0), bias, transB=1)
    # The number of an expert's channels is the number of its weight's rows.
    shape = inner("Concat", inner.integers([-1, slots]), inner("Shape", flat, start=1), axis=0)
    y = inner("Reshape", flat, shape)
    sent = inner("Unsqueeze", inner("Equal", ids, expert), inner.integers([2]))
    after, go_after = inner("Where", sent, y, "y_before"), inner("Identity", "go_before")
    return inner.graph(
        "expert",
        {"round": TensorProto.INT64, "go_before": TensorProto.BOOL, "y_before": TensorProto.FLOAT},
        {go_after: TensorProto.BOOL, after: TensorProto.FLOAT},
        scalars=("round", "go_before", go_after),
    )


def sum_experts(b: Body, x: Value, weights: Value) -> str:
    """Σ_s weights[t, s]·x[t, s]."""
    return b("ReduceSum", b("Mul", x, b.unsqueeze(weights, 2)), b.integers([1]), keepdims=0)


FUNCTIONS: dict[Any, Any] = {
    llmc.linear.default: product,
    llmc.lm_head.default: product,
    llmc.fused_linear.default: fused_linear,
    llmc.gated_linear.default: gated_linear,
    llmc.expert_linear.default: expert_linear,
    llmc.head_linear.default: head_linear,
    llmc.sum_experts.default: sum_experts,
}
