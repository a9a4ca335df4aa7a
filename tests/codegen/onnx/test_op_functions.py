"""Functions of ops that the models of test_stages.py do not reach, each against its eager reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from llmc.codegen.onnx.function_body import standard
from llmc.errors import LoweringError
from tests.blocked_parts import BLOCKED, blocked_parts
from tests.codegen.onnx.calls import aten, check, in_onnxruntime, numbers, ops
from tests.random_trees import random_tree

pytest.importorskip("onnxruntime", exc_type=ImportError)


@pytest.mark.parametrize("columns", [64, 100])
def test_sparse_weights(columns: int) -> None:
    weight = numbers(5, columns).masked_fill(numbers(5, columns, seed=1) > 0, 0.0)
    masks = ops.sparse_masks.default(weight)
    values = ops.sparse_values.default(weight, int((weight != 0).sum()) + 2)
    check(ops.sparse_bitmask.default, values, masks, columns, torch.float32)
    codes = (weight * 20).to(torch.int8)
    parts = ops.sparse_values.default(codes, int((codes != 0).sum())), ops.sparse_masks.default(codes)
    check(ops.sparse_codes.default, *parts, numbers(5, columns // 4).abs(), columns, "int8", torch.float32)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [None, torch.tensor([0.02])])
def test_rounded_tokens(format: str, scale: Tensor | None) -> None:
    x = numbers(6, 32)
    x[2] = 0
    check(ops.round_tokens.default, x, scale, format, torch.float32)


@pytest.mark.parametrize("channels", [64, 70])
def test_tokens_rounded_by_groups(channels: int) -> None:
    x = numbers(6, channels)
    x[2, 32:] = 0
    check(ops.round_tokens.default, x, None, "int8", torch.float32, 32)


@pytest.mark.parametrize("format", BLOCKED)
def test_blocked_codes(format: str) -> None:
    """Bit by bit what they stand for."""
    parts = blocked_parts(format, 6, 512, generator=torch.Generator().manual_seed(0))
    parts = {name: part.float() if part.is_floating_point() else part for name, part in parts.items()}
    given = [parts.get(name) for name in ("codes", "scales", "zeros")]
    more = [parts.get(name) for name in ("scale_steps", "minima", "minimum_steps")]
    (values,) = in_onnxruntime(ops.dequantize.default, *given, format, torch.float32, *more)
    assert torch.equal(torch.from_numpy(values), ops.dequantize.default(*given, format, torch.float32, *more))


def test_choices() -> None:
    x = numbers(4, 9)
    x[1, 3] = x[1, 7] = 5.0  # Of equals the lower one is first.
    check(ops.top_k.default, x, 3)
    check(ops.top_tokens.default, x, 3)
    check(ops.top_tokens.default, x, 3, torch.arange(100, 109, dtype=torch.int32))
    index = torch.tensor([[0, 8], [2, 2], [1, 0], [5, 3]])
    check(ops.take_channels.default, x, index)
    check(ops.mark_channels.default, index, 9)
    check(
        ops.rank_rows.default, torch.tensor([0, 7, 12, 9], dtype=torch.int32), torch.tensor([7], dtype=torch.int32), 4
    )
    check(ops.select_channels.default, x, torch.tensor([3, 1, 1], dtype=torch.int32))


@pytest.mark.parametrize("rows", [2, 3])
def test_an_expert_that_is_none_adds_nothing(rows: int) -> None:
    x = numbers(4, 6) if rows == 2 else numbers(4, 2, 6)
    index = torch.tensor([[0, 2], [2, 1], [3, 0], [1, -1]])
    check(ops.expert_linear.default, x, numbers(15, 6, seed=1), numbers(15, seed=2), index, 3)


@pytest.mark.parametrize("sinks", [None, numbers(4, seed=3)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_token_of_a_tree_does_not_see_what_its_mask_hides(window: int | None, sinks: Tensor | None) -> None:
    tree = random_tree(random.Random(3), 9)
    masks = torch.tensor([*[0] * 4, *tree.masks(), 0], dtype=torch.int64)
    drafts = len(tree.masks())
    starts = torch.tensor([0, 4 + drafts, 5 + drafts], dtype=torch.int32)
    lengths = torch.tensor([7 + drafts, 2], dtype=torch.int32)
    tables = torch.tensor([[3, 0, 5, 1], [2, 0, 0, 0]], dtype=torch.int32)
    k, v = numbers(6, 2, 8, 4, seed=1), numbers(6, 2, 8, 4, seed=2)
    v[4] = torch.nan  # A block that nobody has.
    options = (0.5, window, 4.0, sinks, None, None, masks)
    check(ops.paged_attention.default, numbers(5 + drafts, 4, 4), k, v, starts, lengths, tables, *options)


def test_values_that_are_keys_too() -> None:
    starts, lengths = torch.tensor([0, 4, 5], dtype=torch.int32), torch.tensor([7, 2], dtype=torch.int32)
    tables = torch.tensor([[3, 0], [2, 0]], dtype=torch.int32)
    k, v = numbers(4, 1, 4, 2, seed=1), numbers(4, 1, 4, 5, seed=2)
    v[1] = torch.nan  # A block that nobody has.
    check(ops.paged_attention.default, numbers(5, 3, 7), k, v, starts, lengths, tables, 0.5, latent=True)
    sequence = numbers(6, 1, 2, seed=3), numbers(6, 1, 5, seed=4)
    check(ops.attention.default, numbers(6, 3, 7), *sequence, 0.5, latent=True)
    check(ops.head_linear.default, numbers(6, 3, 4), numbers(3, 5, 4, seed=5))


def test_what_aten_does_to_integers_and_lookups() -> None:
    x, y = torch.tensor([-7, 7, 5]), torch.tensor([2, -2, 3])
    check(aten.floor_divide.default, x, y)
    check(aten.remainder.Tensor, x, y)
    check(aten.div.Tensor_mode, x, y, rounding_mode="trunc")
    check(aten.remainder.Scalar, numbers(5), 0.3)
    check(aten.index.Tensor, numbers(3, 4), [None, torch.tensor([2, 0])])
    check(aten.index.Tensor, numbers(3, 4), [torch.tensor([2, 0]), torch.tensor([1, 3])])
    check(aten.gather.default, numbers(3, 4), 1, torch.tensor([[0, 3], [1, 1], [2, 0]]))
    check(aten.repeat_interleave.self_int, numbers(3, 4), 2, 0)
    check(aten.flatten.using_ints, numbers(2, 3, 4), 1, 2)
    check(aten.var.correction, numbers(3, 4), [-1], correction=1, keepdim=True)
    check(aten.clamp.default, numbers(4), None, 0.2)
    check(aten._to_copy.default, numbers(4), dtype=torch.int32)


def test_a_stage_hands_over_what_it_has() -> None:
    check(ops.hand_over.default, numbers(3, 4), 1)


def test_arguments_that_standard_ops_do_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoweringError, match="n=2 has no counterpart"):
        in_onnxruntime(aten.diff.default, numbers(4), n=2)
    # A function that takes all tensors takes no more.
    monkeypatch.setattr("llmc.codegen.onnx.calls.FUNCTIONS", {ops.hand_over.default: standard("Identity")})
    with pytest.raises(LoweringError, match="stage=1 has no counterpart"):
        in_onnxruntime(ops.hand_over.default, numbers(3, 4), 1)
