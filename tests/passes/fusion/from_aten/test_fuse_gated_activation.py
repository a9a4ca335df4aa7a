"""Activations written out, gates, and what is not a gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.fusion.from_aten.fuse_gated_activation import fuse_gated_activation, fuse_silu, fuse_tanh_gelu
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def _gelu(x: Any, cube: float = 0.044715) -> Any:
    inner = aten.add.Tensor(x, aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3.0), cube))
    tanh = aten.tanh.default(aten.mul.Tensor(inner, math.sqrt(2 / math.pi)))
    return aten.mul.Tensor(aten.mul.Tensor(x, 0.5), aten.add.Tensor(tanh, 1.0))


def test_fuses_silu_and_gelu_that_are_written_out(golden: Golden) -> None:
    def body(x: Any) -> Any:
        return _gelu(aten.mul.Tensor(x, aten.sigmoid.default(x)))

    golden("passes/fuse_activations.txt", rewritten(PatternGraph(body), fuse_silu, fuse_tanh_gelu))


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", aten.silu.default),
        ("gelu", aten.gelu.default),
        ("gelu_tanh", lambda x: aten.gelu.default(x, approximate="tanh")),
        ("relu", aten.relu.default),
        ("sigmoid", aten.sigmoid.default),
    ],
)
def test_fuses_gates(name: str, activation: Callable[[Any], Any]) -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(aten.linear.default(x, weight), activation(x))

    text = rewritten(PatternGraph(body, weight=(WIDTH, WIDTH)), fuse_gated_activation)
    assert f"llmc.gated_activation(%embedding_default, %linear_default, '{name}')" in text


def test_refuses_gelu_with_other_constants() -> None:
    reasons = refusals(PatternGraph(lambda x: _gelu(x, 0.05)), fuse_tanh_gelu)
    assert reasons == ["the cube factor of this GELU is 0.05, expected 0.044715"]


def test_refuses_a_gate_that_is_broadcast() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(aten.sigmoid.default(aten.linear.default(x, weight)), x)

    reasons = refusals(PatternGraph(body, weight=(1, WIDTH)), fuse_gated_activation)
    assert len(reasons) == 1
    assert reasons[0].startswith("the gate is float32[")


def test_refuses_a_gate_that_is_used_twice() -> None:
    def body(x: Any, weight: Any) -> Any:
        gate = aten.silu.default(aten.linear.default(x, weight))
        return aten.add.Tensor(aten.mul.Tensor(gate, x), gate)

    made = PatternGraph(body, weight=(WIDTH, WIDTH))
    assert refusals(made, fuse_gated_activation) == ["silu_default is also used by add_tensor (aten.add.Tensor)"]
