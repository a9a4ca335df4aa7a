"""Attention that is written out becomes llmc.attention if its parts are known and its mask is causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.fusion.from_aten.fuse_eager_attention import fuse_eager_attention
from tests.passes.canonical.pattern_graphs import PatternGraph, refusals, rewritten
from tests.passes.fusion.from_aten.test_fuse_sdpa_attention import flat, heads

aten = torch.ops.aten
Golden = Callable[[str, str], None]
ALLOWED = torch.tril(torch.ones(32, 32))
HIDDEN = torch.tensor(float("-inf"))


def _scores(x: Any, scale: float = 0.5) -> Any:
    return aten.mul.Tensor(aten.matmul.default(heads(x), aten.transpose.int(heads(x), 1, 2)), scale)


def _cut(mask: Any, x: Any) -> Any:
    tokens = aten.sym_size.int(x, 0)
    return aten.slice.Tensor(aten.slice.Tensor(mask, 0, 0, tokens), 1, 0, tokens)


def _weigh(scores: Any, x: Any) -> Any:
    return flat(aten.matmul.default(aten.softmax.int(scores, -1), heads(x)))


def buffer(x: Any, mask: Any, hidden: Any) -> Any:
    return _weigh(aten.where.self(aten.eq.Scalar(_cut(mask, x), 0), hidden, _scores(x)), x)


def added(x: Any, mask: Any) -> Any:
    return _weigh(aten.add.Tensor(_scores(x), _cut(mask, x)), x)


def capped(x: Any, mask: Any) -> Any:
    scores = aten.mul.Tensor(aten.tanh.default(aten.div.Tensor(_scores(x, 2.0), 5.0)), 5.0)
    return _weigh(aten.add.Tensor(scores, _cut(mask, x)), x)


BACK = torch.arange(32.0)[:, None] - torch.arange(32.0)[None, :]
CAUSAL = torch.triu(torch.full((32, 32), float("-inf")), 1)
WINDOW = torch.where((BACK >= 0) & (BACK < 4), 0.0, -1e9)


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        (buffer, {"mask": ALLOWED, "hidden": HIDDEN}),
        (added, {"mask": WINDOW}),
        (capped, {"mask": torch.triu(torch.full((32, 32), float("-inf")), 1)}),
    ],
)
def test_fuses(body: Callable[..., Any], constants: dict[str, Any], golden: Golden) -> None:
    golden(f"passes/fuse_eager_{body.__name__}.txt", rewritten(PatternGraph(body, **constants), fuse_eager_attention))


def test_what_hides_may_be_rounded_to_bfloat16() -> None:
    """As OpenAI's GPT has it."""
    mask = torch.where(BACK >= 0, 0.0, -1e4).bfloat16().float()
    assert "llmc.attention" in rewritten(PatternGraph(added, mask=mask), fuse_eager_attention)


@pytest.mark.parametrize("window", [4, 12])
def test_the_window_is_read_off_the_mask(window: int) -> None:
    """One that shows at the mask's own length only, too."""
    mask = torch.where((BACK >= 0) & (window > BACK), 0.0, -1e9)
    text = rewritten(PatternGraph(added, mask=mask), fuse_eager_attention)
    assert f"llmc.attention(%transpose, %transpose_1, %transpose_2, 0.5, {window}, None, None)" in text


def _widened(x: Any, mask: Any, factor: float | None = None) -> Any:
    """Scores in fp32, as GPT-Neo has them in bf16; of keys times a factor."""
    wide = aten._to_copy.default(heads(x), dtype=torch.float32)
    keys = wide if factor is None else aten.mul.Tensor(wide, factor)
    scores = aten.add.Tensor(aten.matmul.default(wide, aten.transpose.int(keys, 1, 2)), _cut(mask, x))
    weights = aten._to_copy.default(aten.softmax.int(scores, -1), dtype=torch.bfloat16)
    return flat(aten.matmul.default(weights, heads(x)))


def test_queries_and_keys_are_taken_as_they_were_before_they_are_widened() -> None:
    made = PatternGraph(_widened, torch.bfloat16, mask=CAUSAL)
    text = rewritten(made, fuse_eager_attention, tolerance=2e-2)
    assert "bfloat16[T, 2, 4] = llmc.attention(" in text


def test_refuses_queries_and_keys_of_another_dtype() -> None:
    (reason,) = refusals(
        PatternGraph(lambda x, mask: _widened(x, mask, 2.0), torch.bfloat16, mask=CAUSAL), fuse_eager_attention
    )
    assert reason.endswith("expected one dtype")


def _refused(body: Callable[..., Any], **constants: Any) -> str:
    (reason,) = refusals(PatternGraph(body, **constants), fuse_eager_attention)
    return reason


def test_refuses_scores_without_a_mask() -> None:
    assert _refused(lambda x: _weigh(_scores(x), x)) == "the attention is not causal: its scores are not masked"


def test_refuses_a_mask_that_is_not_causal() -> None:
    mask = torch.zeros(32, 32)
    assert _refused(added, mask=mask) == "the mask is not causal: of 5 positions, query 0 sees key 1"


def test_refuses_a_bias_on_the_scores() -> None:
    mask = torch.where(BACK >= 0, 0.25 * BACK**2, -1e9)
    reason = _refused(added, mask=mask)
    assert reason == "the mask adds 0.25 to the score of query 1 and key 0, expected a slope over positions"


def test_a_number_for_all_keys_of_a_query_changes_no_softmax() -> None:
    text = rewritten(PatternGraph(added, mask=WINDOW + torch.arange(32.0)[:, None]), fuse_eager_attention)
    assert "llmc.attention(%transpose, %transpose_1, %transpose_2, 0.5, 4, None, None)" in text


def by_head(x: Any, mask: Any) -> Any:
    tokens = aten.sym_size.int(x, 0)
    cut = aten.slice.Tensor(aten.slice.Tensor(mask, 1, 0, tokens), 2, 0, tokens)
    return _weigh(aten.add.Tensor(_scores(x), cut), x)


def test_slopes_are_read_off_the_mask() -> None:
    mask = CAUSAL - torch.tensor([0.5, 0.0625])[:, None, None] * BACK
    text = rewritten(PatternGraph(by_head, mask=mask), fuse_eager_attention)
    assert "%slopes: float32[2] = constant" in text
    assert "llmc.attention(%transpose, %transpose_1, %transpose_2, 0.5, None, None, None, %slopes)" in text


def test_chunks_are_read_off_the_mask() -> None:
    rows = torch.arange(32)
    mask = torch.where(rows[:, None] // 6 == rows[None, :] // 6, CAUSAL, float("-inf"))
    text = rewritten(PatternGraph(added, mask=mask), fuse_eager_attention)
    assert "llmc.attention(%transpose, %transpose_1, %transpose_2, 0.5, None, None, None, None, 6)" in text


def test_refuses_heads_that_hide_different_keys() -> None:
    reason = _refused(by_head, mask=torch.stack((CAUSAL, WINDOW)))
    assert reason == "the heads' masks differ in what they hide, expected one mask for all"


def test_refuses_a_mask_from_the_checkpoint() -> None:
    assert "it depends on mask, whose values are not known" in _refused(added, mask=(32, 32))


def test_refuses_masked_scores_that_stay_visible() -> None:
    reason = _refused(buffer, mask=ALLOWED, hidden=torch.tensor(-1.0))
    assert reason == "masked scores become -1.0, expected -9984.0 or less"


def test_refuses_weights_that_are_used_twice() -> None:
    def body(x: Any, mask: Any) -> Any:
        weights = aten.softmax.int(aten.add.Tensor(_scores(x), _cut(mask, x)), -1)
        y = flat(aten.matmul.default(weights, heads(x)))
        return aten.add.Tensor(y, flat(aten.matmul.default(weights, heads(x))))

    assert _refused(body, mask=ALLOWED).startswith("the attention weights have 2 uses")


def test_refuses_a_softmax_over_queries() -> None:
    def body(x: Any, mask: Any) -> Any:
        scores = aten.add.Tensor(_scores(x), _cut(mask, x))
        return flat(aten.matmul.default(aten.softmax.int(scores, 1), heads(x)))

    assert _refused(body, mask=ALLOWED) == "the softmax is not over the last axis"


def test_refuses_a_softmax_of_something_else() -> None:
    def body(x: Any) -> Any:
        return aten.mul.Tensor(aten.softmax.int(x, -1), x)

    assert _refused(body).startswith("the attention weights go into aten.mul.Tensor")


def test_scores_may_be_masked_twice_and_scaled_afterwards() -> None:
    def body(x: Any, mask: Any, floor: Any) -> Any:
        scores = aten.add.Tensor(aten.add.Tensor(_scores(x), _cut(mask, x)), _cut(mask, x))
        return _weigh(aten.maximum.default(aten.div.Tensor(scores, 2.0), floor), x)

    text = rewritten(PatternGraph(body, mask=WINDOW, floor=torch.tensor(-3e38)), fuse_eager_attention)
    assert "llmc.attention(%transpose, %transpose_1, %transpose_2, 0.25, 4, None, None)" in text


def test_refuses_a_factor_for_each_key() -> None:
    def body(x: Any, mask: Any, factor: Any) -> Any:
        return _weigh(aten.add.Tensor(aten.mul.Tensor(_scores(x), _cut(factor, x)), _cut(mask, x)), x)

    reason = _refused(body, mask=CAUSAL, factor=(1 + torch.arange(32.0)).expand(32, 32).contiguous())
    assert reason == "visible scores are multiplied by [(0.5, None), (2.5, None)], expected one number for all"


def test_refuses_scores_that_are_clamped_where_they_show() -> None:
    def body(x: Any, mask: Any, floor: Any) -> Any:
        return _weigh(aten.maximum.default(aten.add.Tensor(_scores(x), _cut(mask, x)), floor), x)

    reason = _refused(body, mask=CAUSAL, floor=torch.tensor(-1.0))
    assert reason == "the scores are clamped, expected at -9984.0 or less"


def test_refuses_a_cap_over_the_mask() -> None:
    def body(x: Any, mask: Any) -> Any:
        return _weigh(aten.tanh.default(aten.add.Tensor(_scores(x), _cut(mask, x))), x)

    assert _refused(body, mask=CAUSAL) == "the scores are capped after they were masked"


def test_refuses_other_arithmetic_on_the_scores() -> None:
    def body(x: Any, mask: Any) -> Any:
        return _weigh(aten.add.Tensor(aten.exp.default(_scores(x)), _cut(mask, x)), x)

    assert _refused(body, mask=torch.triu(torch.full((32, 32), float("-inf")), 1)).startswith(
        "the scores go through aten.exp"
    )


def test_refuses_keys_that_are_not_transposed() -> None:
    def body(x: Any, mask: Any, positions: Any) -> Any:
        keys = aten.exp.default(aten.transpose.int(heads(x), 1, 2))
        return _weigh(aten.add.Tensor(aten.matmul.default(heads(x), keys), _cut(mask, x)), x)

    mask = torch.triu(torch.full((32, 32), float("-inf")), 1)
    assert _refused(body, mask=mask).endswith("are not transposed: exp_default")
