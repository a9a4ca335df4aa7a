"""Rotary embedding: the angles from positions, the rotation in four spellings, partial and in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.canonical.merge_duplicates import merge_duplicates
from llmc.passes.canonical.simplify_layout import simplify_layout
from llmc.passes.canonical.simplify_repeats import simplify_repeats
from llmc.passes.fusion.from_aten.fuse_rope import fuse_partial_rope, fuse_rope, fuse_rope_casts
from llmc.passes.fusion.from_aten.fuse_rope_angles import fuse_rope_angles
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]
HALF = WIDTH // 4
INV_FREQ = torch.tensor([1.0, 0.25])
PASSES = (
    merge_duplicates,
    fuse_rope_angles,
    simplify_repeats,
    fuse_rope,
    simplify_layout,
    fuse_rope_casts,
    fuse_partial_rope,
)


def _angles(positions: Any, inv_freq: Any) -> Any:
    column = aten.unsqueeze.default(aten._to_copy.default(positions, dtype=torch.float32), 1)
    return aten.mul.Tensor(column, inv_freq)


def _heads(x: Any) -> Any:
    """[T, WIDTH] as [2 heads, T, WIDTH / 2]."""
    return aten.transpose.int(aten.reshape.default(x, [-1, 2, WIDTH // 2]), 0, 1)


def _flat(x: Any) -> Any:
    return aten.reshape.default(aten.transpose.int(x, 0, 1), [-1, WIDTH])


def _rotate_half(x: Any, cos: Any, sin: Any, half: int = HALF) -> Any:
    back = aten.neg.default(aten.slice.Tensor(x, -1, half, 2 * half))
    turned = aten.cat.default([back, aten.slice.Tensor(x, -1, 0, half)], -1)
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(turned, sin))


def halves(x: Any, positions: Any, inv_freq: Any) -> Any:
    angles = _angles(positions, inv_freq)
    both = aten.cat.default([angles, angles], -1)
    cos, sin = (aten.unsqueeze.default(f(both), 0) for f in (aten.cos.default, aten.sin.default))
    return _flat(_rotate_half(_heads(x), cos, sin))


def scaled(x: Any, positions: Any, inv_freq: Any) -> Any:
    angles = _angles(positions, inv_freq)
    both = aten.cat.default([angles, angles], -1)
    cos, sin = (aten.mul.Tensor(f(both), 1.25) for f in (aten.cos.default, aten.sin.default))
    return _flat(_rotate_half(_heads(x), cos, sin))


def pairs(x: Any, positions: Any, inv_freq: Any) -> Any:
    both = aten.repeat_interleave.self_int(_angles(positions, inv_freq), 2, -1)
    cos, sin = (aten.unsqueeze.default(f(both), 1) for f in (aten.cos.default, aten.sin.default))
    heads = aten.reshape.default(x, [-1, 2, WIDTH // 2])
    odd, even = (aten.slice.Tensor(heads, 2, i, WIDTH // 2, 2) for i in (1, 0))
    turned = aten.reshape.default(aten.stack.default([aten.neg.default(odd), even], -1), [-1, 2, WIDTH // 2])
    return aten.reshape.default(aten.add.Tensor(aten.mul.Tensor(heads, cos), aten.mul.Tensor(turned, sin)), [-1, WIDTH])


def pairs_of_halves(x: Any, positions: Any, inv_freq: Any) -> Any:
    angles = _angles(positions, inv_freq)
    both = aten.cat.default([angles, angles], -1)
    cos, sin = (aten.unsqueeze.default(aten._to_copy.default(f(both), dtype=torch.float32), 0) for f in _COS_SIN)
    cos, sin = (aten.repeat_interleave.self_int(aten.slice.Tensor(a, -1, 0, HALF), 2, -1) for a in (cos, sin))
    heads = _heads(x)
    odd, even = (aten.slice.Tensor(heads, -1, i, WIDTH // 2, 2) for i in (1, 0))
    turned = aten.reshape.default(aten.stack.default([aten.neg.default(odd), even], -1), [2, -1, WIDTH // 2])
    return _flat(aten.add.Tensor(aten.mul.Tensor(heads, cos), aten.mul.Tensor(turned, sin)))


def split(x: Any, positions: Any, inv_freq: Any) -> Any:
    angles = _angles(positions, inv_freq)
    cos, sin = (aten.unsqueeze.default(f(angles), 1) for f in (aten.cos.default, aten.sin.default))
    heads = aten.reshape.default(x, [-1, 2, WIDTH // 2])
    a, b = aten.slice.Tensor(heads, 2, 0, HALF), aten.slice.Tensor(heads, 2, HALF, 2 * HALF)
    first = aten.sub.Tensor(aten.mul.Tensor(a, cos), aten.mul.Tensor(b, sin))
    second = aten.add.Tensor(aten.mul.Tensor(b, cos), aten.mul.Tensor(a, sin))
    return aten.reshape.default(aten.cat.default([first, second], -1), [-1, WIDTH])


def partial(x: Any, positions: Any, inv_freq: Any) -> Any:
    angles = _angles(positions, inv_freq)
    both = aten.cat.default([angles, angles], -1)
    cos, sin = (aten.unsqueeze.default(f(both), 0) for f in (aten.cos.default, aten.sin.default))
    head = aten.transpose.int(aten.reshape.default(x, [-1, 1, WIDTH]), 0, 1)
    turned = _rotate_half(aten.slice.Tensor(head, 2, 0, 4), cos, sin)
    return _flat(aten.cat.default([turned, aten.slice.Tensor(head, 2, 4, WIDTH)], -1))


@pytest.mark.parametrize("body", [halves, scaled, pairs, pairs_of_halves, split, partial])
def test_fuses(body: Callable[..., Any], golden: Golden) -> None:
    golden(f"passes/fuse_rope_{body.__name__}.txt", rewritten(PatternGraph(body, inv_freq=INV_FREQ), *PASSES))


def test_fuses_bf16_heads_turned_by_fp32_angles(golden: Golden) -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        angles = _angles(positions, inv_freq)
        cos, sin = (aten.unsqueeze.default(f(aten.cat.default([angles, angles], -1)), 0) for f in _COS_SIN)
        return _flat(aten._to_copy.default(_rotate_half(_heads(x), cos, sin), dtype=torch.bfloat16))

    made = PatternGraph(body, torch.bfloat16, inv_freq=INV_FREQ)
    golden("passes/fuse_rope_bf16.txt", rewritten(made, *PASSES, tolerance=0.05))


def test_fuses_heads_that_are_widened_after_they_are_turned() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        angles = _angles(positions, inv_freq)
        cos, sin = (aten.unsqueeze.default(f(aten.cat.default([angles, angles], -1)), 0) for f in _COS_SIN)
        heads = _heads(x)
        back = aten.neg.default(aten.slice.Tensor(heads, -1, HALF, 2 * HALF))
        turned = aten.cat.default([back, aten.slice.Tensor(heads, -1, 0, HALF)], -1)
        wide, wide_turned = (aten._to_copy.default(t, dtype=torch.float32) for t in (heads, turned))
        y = aten.add.Tensor(aten.mul.Tensor(wide, cos), aten.mul.Tensor(wide_turned, sin))
        return _flat(aten._to_copy.default(y, dtype=torch.bfloat16))

    text = rewritten(PatternGraph(body, torch.bfloat16, inv_freq=INV_FREQ), *PASSES, tolerance=0.05)
    assert text.count("llmc.rope(") == 1
    assert "aten._to_copy" not in text


def test_angles_that_do_not_grow_with_the_position_are_refused() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        angles = aten.sqrt.default(_angles(positions, inv_freq))
        return _flat(_rotate_half(_heads(x), *(f(aten.cat.default([angles, angles], -1)) for f in _COS_SIN)))

    reasons = refusals(PatternGraph(body, inv_freq=INV_FREQ), fuse_rope_angles)
    assert len(reasons) == 2
    assert "not the position times a frequency, or change with the length" in reasons[0]


def test_angles_that_change_with_the_length_are_refused() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        longest = aten.amax.default(aten._to_copy.default(positions, dtype=torch.float32), [0], True)
        angles = aten.div.Tensor(_angles(positions, inv_freq), aten.clamp_min.default(longest, 64.0))
        return _flat(_rotate_half(_heads(x), *(f(aten.cat.default([angles, angles], -1)) for f in _COS_SIN)))

    reasons = refusals(PatternGraph(body, inv_freq=INV_FREQ), fuse_rope_angles)
    assert "change with the length" in reasons[0]


def test_angles_from_the_tokens_are_refused() -> None:
    def body(x: Any) -> Any:
        return aten.mul.Tensor(aten.cos.default(x), aten.sin.default(x))

    reasons = refusals(PatternGraph(body), fuse_rope_angles)
    assert reasons[0].startswith("these are not rotary angles: it depends on embed")


def test_angles_over_no_tokens_are_refused() -> None:
    def body(x: Any, inv_freq: Any) -> Any:
        return aten.mul.Tensor(x, aten.cos.default(inv_freq))

    reasons = refusals(PatternGraph(body, inv_freq=torch.ones(WIDTH)), fuse_rope_angles)
    assert reasons == ["these are not rotary angles: they have 0 axes over tokens, expected 1"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x, cos, sin: _rotate_half(aten.unsqueeze.default(x, 0), cos, sin), "x has 4 axes"),
        (lambda x, cos, sin: _rotate_half_at(x, cos, sin, 1), "2 angles turn 4 channels, split at {'middle': 1}"),
    ],
)
def test_rotations_of_another_shape_are_refused(wrong: Callable[..., Any], reason: str) -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        angles = torch.ops.llmc.rope_angles.default(positions, inv_freq, 1.0)
        cos, sin = (aten.cat.default([half, half], -1) for half in (angles[0], angles[1]))
        return aten.reshape.default(wrong(_heads(x), cos, sin), [-1, WIDTH])

    (seen,) = refusals(PatternGraph(body, inv_freq=INV_FREQ), fuse_rope)
    assert reason in seen


def test_a_partial_rotation_put_together_otherwise_is_refused() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = (torch.ops.llmc.rope_angles.default(positions, inv_freq, 1.0)[i] for i in range(2))
        head = aten.reshape.default(x, [-1, 1, WIDTH])
        turned = torch.ops.llmc.rope.default(aten.slice.Tensor(head, 2, 0, 4), cos, sin, False)
        both = aten.cat.default([turned, aten.slice.Tensor(head, 2, 4, 6)], 2)
        return aten.reshape.default(aten.cat.default([both, aten.slice.Tensor(head, 2, 6, 8)], 2), [-1, WIDTH])

    reasons = refusals(PatternGraph(body, inv_freq=INV_FREQ), fuse_partial_rope)
    assert reasons == ["channels 0 to 6 are put together, x has 0 to 8"]


def test_a_rotation_beside_all_channels_again_is_refused() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = (torch.ops.llmc.rope_angles.default(positions, inv_freq, 1.0)[i] for i in range(2))
        head = aten.reshape.default(x, [-1, 1, WIDTH])
        turned = torch.ops.llmc.rope.default(aten.slice.Tensor(head, 2, 0, None), cos, sin, False)
        both = aten.cat.default([turned, aten.slice.Tensor(head, 2, None, WIDTH)], 2)
        return aten.reshape.default(aten.slice.Tensor(both, 2, 4, 4 + WIDTH), [-1, WIDTH])

    reasons = refusals(PatternGraph(body, inv_freq=INV_FREQ), fuse_partial_rope)
    assert reasons == ["16 channels are put together, x has 8"]


def test_a_rotation_cast_to_another_dtype_keeps_its_casts() -> None:
    def body(x: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = (torch.ops.llmc.rope_angles.default(positions, inv_freq, 1.0)[i] for i in range(2))
        wide = aten._to_copy.default(aten.reshape.default(x, [-1, 2, 4]), dtype=torch.float32)
        turned = aten._to_copy.default(torch.ops.llmc.rope.default(wide, cos, sin, False), dtype=torch.float16)
        return aten.reshape.default(turned, [-1, WIDTH])

    made = PatternGraph(body, torch.bfloat16, inv_freq=INV_FREQ)
    assert refusals(made, fuse_rope_casts) == ["the rotation returns torch.float16 but x is torch.bfloat16"]


def _rotate_half_at(x: Any, cos: Any, sin: Any, middle: int) -> Any:
    back = aten.neg.default(aten.slice.Tensor(x, -1, middle, 4))
    turned = aten.cat.default([back, aten.slice.Tensor(x, -1, 0, middle)], -1)
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(turned, sin))


_COS_SIN = (aten.cos.default, aten.sin.default)
