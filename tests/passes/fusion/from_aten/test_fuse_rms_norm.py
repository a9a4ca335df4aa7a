"""RMSNorm in the forms that models write it, and what is not one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.fusion.from_aten.fuse_rms_norm import fuse_rms_norm, fuse_rms_norm_without_weight
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def _normalized(x: Any, eps: Any = 1e-6) -> Any:
    y = aten._to_copy.default(x, dtype=torch.float32)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(y, 2), [-1], True)
    return aten.mul.Tensor(y, aten.rsqrt.default(aten.add.Tensor(mean, eps)))


def llama(x: Any, weight: Any) -> Any:
    return aten.mul.Tensor(weight, aten._to_copy.default(_normalized(x), dtype=torch.bfloat16))


def llama_fp32(x: Any, weight: Any) -> Any:
    return aten.mul.Tensor(_normalized_fp32(x), weight)


def gemma(x: Any, weight: Any) -> Any:
    wide = aten._to_copy.default(weight, dtype=torch.float32)
    return aten._to_copy.default(aten.mul.Tensor(_normalized(x), wide), dtype=torch.bfloat16)


def divided(x: Any, weight: Any) -> Any:
    mean = aten.mean.dim(aten.mul.Tensor(x, x), [1], True)
    return aten.mul.Tensor(aten.div.Tensor(x, aten.sqrt.default(aten.add.Tensor(mean, 1e-5))), weight)


def functional(x: Any, weight: Any) -> Any:
    return aten.rms_norm.default(x, [WIDTH], weight)


def _normalized_fp32(x: Any) -> Any:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
    return aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(mean, 1e-6)))


@pytest.mark.parametrize(
    ("body", "dtype", "tolerance"),
    [
        (llama, torch.bfloat16, 0.05),
        (llama_fp32, torch.float32, 1e-5),
        (gemma, torch.bfloat16, 0.05),
        (divided, torch.float32, 1e-5),
        (functional, torch.float32, 1e-5),
    ],
)
def test_fuses(body: Callable[..., Any], dtype: torch.dtype, tolerance: float, golden: Golden) -> None:
    made = PatternGraph(body, dtype, weight=(WIDTH,))
    text = rewritten(made, fuse_rms_norm, fuse_rms_norm_without_weight, tolerance=tolerance)
    golden(f"passes/fuse_rms_norm_{body.__name__}.txt", text)


def test_fuses_without_a_weight(golden: Golden) -> None:
    text = rewritten(PatternGraph(_normalized_fp32), fuse_rms_norm, fuse_rms_norm_without_weight)
    golden("passes/fuse_rms_norm_without_weight.txt", text)


def test_refuses_a_result_of_another_dtype() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(weight, _normalized(x))

    made = PatternGraph(body, torch.bfloat16, weight=(WIDTH,))
    assert refusals(made, fuse_rms_norm) == ["the norm returns torch.float32 but its input is torch.bfloat16"]


def test_refuses_a_weight_of_two_axes() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.reshape.default(aten.mul.Tensor(_normalized_fp32(x), weight), [-1, WIDTH])

    made = PatternGraph(body, weight=(1, WIDTH))
    assert refusals(made, fuse_rms_norm) == ["the weight is [1, 8], expected [8]"]


def test_refuses_an_epsilon_that_is_not_constant() -> None:
    def body(x: Any, weight: Any, eps: Any) -> Any:
        mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        return aten.mul.Tensor(aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(mean, eps))), weight)

    made = PatternGraph(body, weight=(WIDTH,), eps=torch.tensor([1e-5]))
    assert refusals(made, fuse_rms_norm) == ["eps is eps, expected a constant"]


def test_refuses_a_norm_over_two_axes() -> None:
    def body(x: Any, weight: Any) -> Any:
        heads = aten.reshape.default(x, [-1, 2, 4])
        return aten.reshape.default(aten.rms_norm.default(heads, [2, 4], weight, 1e-5), [-1, WIDTH])

    made = PatternGraph(body, weight=(2, 4))
    assert refusals(made, fuse_rms_norm) == ["the norm is over the last 2 axes [2, 4], expected one"]


def test_names_the_extra_user() -> None:
    def body(x: Any, weight: Any) -> Any:
        normalized = _normalized_fp32(x)
        return aten.add.Tensor(aten.mul.Tensor(normalized, weight), normalized)

    made = PatternGraph(body, weight=(WIDTH,))
    assert refusals(made, fuse_rms_norm) == ["mul_tensor is also used by add_tensor_1 (aten.add.Tensor)"]


@pytest.mark.parametrize(("scaled", "plain"), [(1, 1), (2, 0), (2, 1)])
def test_norms_of_one_value_share_what_normalizes_it(scaled: int, plain: int) -> None:
    def body(x: Any, **weights: Any) -> Any:
        y = _normalized(x)
        wide = [aten._to_copy.default(weight, dtype=torch.float32) for weight in weights.values()]
        norms = [*(aten.mul.Tensor(y, weight) for weight in wide), *[y] * plain]
        return sum(aten._to_copy.default(norm, dtype=torch.bfloat16) for norm in norms)

    made = PatternGraph(body, torch.bfloat16, **{f"weight_{i}": (WIDTH,) for i in range(scaled)})
    text = rewritten(made, fuse_rms_norm, fuse_rms_norm_without_weight, tolerance=0.05)
    assert text.count("llmc.rms_norm") == scaled + plain and "aten.rsqrt" not in text


def test_records_the_mean_over_another_axis_as_a_near_miss() -> None:
    def body(x: Any, weight: Any) -> Any:
        mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [0], True)
        return aten.mul.Tensor(aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(mean, 1e-6))), weight)

    made = PatternGraph(body, weight=(WIDTH,))
    assert refusals(made, fuse_rms_norm) == ["argument 'dim' of aten.mean.dim is 0, expected -1"]
