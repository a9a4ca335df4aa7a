"""Every operation comes out in its one spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.passes.canonical.normalize_ops import normalize_ops
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def test_reshapes_lose_their_shape_arithmetic(golden: Golden) -> None:
    def body(x: Any) -> Any:
        tokens = aten.sym_size.int(x, 0)
        x = aten._unsafe_view.default(aten.view.default(x, [tokens, 2, 4]), [tokens, WIDTH])
        return aten.flatten.using_ints(aten.unflatten.int(x, 1, [2, 4]), 1, 2)

    golden("passes/normalize_reshapes.txt", rewritten(PatternGraph(body), normalize_ops))


def test_parts_of_splits_become_slices(golden: Golden) -> None:
    def body(x: Any) -> Any:
        a, b = (aten.split.Tensor(x, 4, -1)[i] for i in range(2))
        c, d = (aten.split_with_sizes.default(x, [3, 5], 1)[i] for i in range(2))
        e, f = (aten.chunk.default(x, 2, 1)[i] for i in (0, -1))
        g = aten.unbind.int(aten.reshape.default(x, [-1, 2, 4]), 1)[1]
        first = aten.cat.default([aten.add.Tensor(a, b), aten.add.Tensor(aten.mul.Tensor(e, f), g)], 1)
        return aten.add.Tensor(first, aten.cat.default([d, c], 1))

    golden("passes/normalize_splits.txt", rewritten(PatternGraph(body), normalize_ops))


def test_scalars_transposes_norms_and_softmax(golden: Golden) -> None:
    def body(x: Any, weight: Any) -> Any:
        x = aten.mul.Scalar(aten.add.Scalar(aten.rsub.Scalar(x, 2.0), 1.0), 0.5)
        x = aten.square.default(aten.sub.Scalar(aten.div.Scalar(x, 3.0), 1.0))
        x = aten.masked_fill.Scalar(x, aten.gt.Scalar(x, 0.5), 0.25)
        x = aten.where.ScalarOther(aten.lt.Scalar(x, 0.75), x, 1.0)
        x = aten.native_layer_norm.default(x, [WIDTH], weight, None, 1e-5)[0]
        x = aten._softmax.default(x, -1, False)
        heads = aten.permute.default(aten.reshape.default(x, [-1, 2, 4]), [1, 0, 2])
        heads = aten.transpose.int(heads, -2, -3)
        return aten.reshape.default(aten.squeeze.dims(aten.unsqueeze.default(heads, -1), [3]), [-1, WIDTH])

    golden("passes/normalize_more.txt", rewritten(PatternGraph(body, weight=(WIDTH,)), normalize_ops))


def test_vector_norms_are_sums() -> None:
    def body(x: Any) -> Any:
        first, second = (aten.slice.Tensor(x, 1, start, start + 4) for start in (0, 4))
        one, two = (aten.linalg_vector_norm.default(x, order, [-1], True) for order in (1.0, 2.0))
        return aten.concatenate.default([aten.mul.Tensor(first, one), aten.mul.Tensor(second, two)], 1)

    text = rewritten(PatternGraph(body), normalize_ops)
    assert "linalg_vector_norm" not in text and "concatenate" not in text
    assert all(f"aten.{op}(" in text for op in ("abs", "sqrt", "cat"))


def test_other_norms_stay() -> None:
    def body(x: Any) -> Any:
        return aten.div.Tensor(x, aten.linalg_vector_norm.default(x, 3.0, [-1], True))

    assert refusals(PatternGraph(body), normalize_ops) == []


def test_what_stands_for_several_ops() -> None:
    def body(x: Any) -> Any:
        y = aten.sub.Tensor(aten.log_sigmoid.default(x), aten.logsumexp.default(x, [-1], True))
        return aten.div.Tensor(y, aten.linalg_vector_norm.default(x, 2, [-1], True))

    text = rewritten(PatternGraph(body), normalize_ops)
    assert not any(name in text for name in ("log_sigmoid", "logsumexp", "vector_norm"))


def test_flash_attention_becomes_sdpa() -> None:
    def body(x: Any) -> Any:
        heads = aten.unsqueeze.default(aten.transpose.int(aten.reshape.default(x, [-1, 2, 4]), 0, 1), 0)
        y = aten._scaled_dot_product_flash_attention_for_cpu.default(heads, heads, heads, 0.0, True)[0]
        return aten.reshape.default(aten.transpose.int(aten.squeeze.dim(y, 0), 0, 1), [-1, WIDTH])

    assert "aten.scaled_dot_product_attention(" in rewritten(PatternGraph(body), normalize_ops)


def test_a_reshape_of_two_symbolic_sizes_keeps_its_arithmetic() -> None:
    def body(x: Any) -> Any:
        scores = aten.matmul.default(x, aten.transpose.int(x, 0, 1))
        tokens = aten.sym_size.int(x, 0)
        twice = aten.view.default(aten.stack.default([scores, scores], 1), [tokens * 2, tokens])
        return aten.slice.Tensor(aten.matmul.default(twice, x), 0, 0, tokens)

    assert refusals(PatternGraph(body), normalize_ops) == []


def test_axes_of_size_1_are_put_where_they_are_wanted() -> None:
    def body(x: Any) -> Any:
        scores = aten.matmul.default(x, aten.transpose.int(x, 0, 1))
        tokens = aten.sym_size.int(x, 0)
        first = aten.view.default(aten.unsqueeze.default(scores, 2), [1, tokens, tokens])
        return aten.matmul.default(aten.squeeze.dim(first, 0), x)

    text = rewritten(PatternGraph(body), normalize_ops)
    assert "aten.view" not in text and "aten.reshape" not in text and "sym_size" not in text


def test_a_permute_becomes_transposes_and_operands_are_not_expanded() -> None:
    def body(x: Any, bias: Any) -> Any:
        turned = aten.permute.default(aten.reshape.default(x, [-1, 2, WIDTH // 2]), [1, 2, 0])
        back = aten.reshape.default(aten.permute.default(turned, [2, 0, 1]), [-1, WIDTH])
        return aten.add.Tensor(back, aten.expand.default(bias, [aten.sym_size.int(x, 0), WIDTH]))

    text = rewritten(PatternGraph(body, bias=(WIDTH,)), normalize_ops)
    assert "permute" not in text and "expand" not in text and "%bias)" in text


def test_deviations_become_means_and_broadcasts_what_they_spread() -> None:
    def body(x: Any, numbers: Any) -> Any:
        same = aten.broadcast_tensors.default([numbers, numbers])
        apart = aten.multiply.Tensor(aten.std.dim(x, [-1], False, True), same[1])
        return aten.add.Tensor(aten.sub.Tensor(x, apart), aten.std.dim(x, [1], False, True))

    text = rewritten(PatternGraph(body, numbers=(WIDTH,)), normalize_ops)
    assert not any(f"aten.{op}" in text for op in ("std", "broadcast_tensors", "multiply"))


def test_deviations_of_samples_stay() -> None:
    def body(x: Any) -> Any:
        return aten.add.Tensor(x, aten.std.dim(x, [-1], True, True))

    assert refusals(PatternGraph(body), normalize_ops) == []
