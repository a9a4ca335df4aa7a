"""LayerNorm as torch calls it and written out, and what is not one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.fusion.from_aten.fuse_layer_norm import (
    fuse_layer_norm,
    fuse_layer_norm_casts,
    fuse_layer_norm_without_bias,
    fuse_layer_norm_without_weight,
)
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]
PASSES = (fuse_layer_norm, fuse_layer_norm_without_bias, fuse_layer_norm_without_weight, fuse_layer_norm_casts)


def functional(x: Any, weight: Any, bias: Any) -> Any:
    return aten.layer_norm.default(x, [WIDTH], weight, bias)


def _normalized(x: Any, eps: Any = 1e-5) -> Any:
    mean = aten.mean.dim(x, [-1], True)
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(aten.sub.Tensor(x, mean), 2), [-1], True)
    return aten.mul.Tensor(aten.sub.Tensor(x, mean), aten.rsqrt.default(aten.add.Tensor(variance, eps)))


def with_bias(x: Any, weight: Any, bias: Any) -> Any:
    variance = aten.var.correction(x, [1], correction=0, keepdim=True)
    centred = aten.sub.Tensor(x, aten.mean.dim(x, [1], True))
    y = aten.div.Tensor(centred, aten.sqrt.default(aten.add.Tensor(variance, 1e-5)))
    return aten.add.Tensor(aten.mul.Tensor(y, weight), bias)


def cohere(x: Any, weight: Any) -> Any:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    y = aten.mul.Tensor(aten._to_copy.default(weight, dtype=torch.float32), _normalized(wide))
    return aten._to_copy.default(y, dtype=torch.bfloat16)


def plain(x: Any) -> Any:
    return _normalized(x)


def functional_in_fp32(x: Any, weight: Any, bias: Any) -> Any:
    wide, weight, bias = (aten._to_copy.default(t, dtype=torch.float32) for t in (x, weight, bias))
    return aten._to_copy.default(aten.layer_norm.default(wide, [WIDTH], weight, bias), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("body", "dtype", "weights", "tolerance"),
    [
        (functional, torch.float32, ("weight", "bias"), 1e-5),
        (functional_in_fp32, torch.bfloat16, ("weight", "bias"), 0.05),
        (with_bias, torch.float32, ("weight", "bias"), 1e-5),
        (cohere, torch.bfloat16, ("weight",), 0.05),
        (plain, torch.float32, (), 1e-5),
    ],
)
def test_fuses(
    body: Callable[..., Any], dtype: torch.dtype, weights: tuple[str, ...], tolerance: float, golden: Golden
) -> None:
    made = PatternGraph(body, dtype, **dict.fromkeys(weights, (WIDTH,)))
    golden(f"passes/fuse_layer_norm_{body.__name__}.txt", rewritten(made, *PASSES, tolerance=tolerance))


def test_refuses_a_norm_over_two_axes() -> None:
    def body(x: Any, weight: Any, bias: Any) -> Any:
        heads = aten.reshape.default(x, [-1, 2, 4])
        return aten.reshape.default(aten.layer_norm.default(heads, [2, 4], weight, bias), [-1, WIDTH])

    made = PatternGraph(body, weight=(2, 4), bias=(2, 4))
    assert refusals(made, *PASSES) == ["the norm is over the last 2 axes [2, 4], expected one"]


def test_refuses_a_weight_of_another_length() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(_normalized(x), weight)

    made = PatternGraph(body, weight=(1,))
    assert refusals(made, fuse_layer_norm_without_bias) == ["the weight is [1], expected [8]"]


def test_refuses_a_result_of_another_dtype() -> None:
    def body(x: Any) -> Any:
        return _normalized(aten._to_copy.default(x, dtype=torch.float32))

    made = PatternGraph(body, torch.bfloat16)
    reason = "the norm returns torch.float32 but its input is torch.bfloat16"
    assert refusals(made, fuse_layer_norm_without_weight) == [reason]


def test_refuses_an_epsilon_that_is_not_constant() -> None:
    def body(x: Any, eps: Any) -> Any:
        return _normalized(x, eps)

    made = PatternGraph(body, eps=torch.tensor([1e-5]))
    assert refusals(made, fuse_layer_norm_without_weight) == ["eps is eps, expected a constant"]
