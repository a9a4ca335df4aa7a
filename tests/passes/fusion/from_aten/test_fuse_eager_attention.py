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


WINDOW = torch.where(torch.tril(torch.ones(32, 32)) - torch.tril(torch.ones(32, 32), -4) > 0, 0.0, -1e9)


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


def test_the_window_is_read_off_the_mask() -> None:
    text = rewritten(PatternGraph(added, mask=WINDOW), fuse_eager_attention)
    assert "llmc.attention(%transpose, %transpose_1, %transpose_2, 0.5, 4, None, None)" in text


def _refused(body: Callable[..., Any], **constants: Any) -> str:
    (reason,) = refusals(PatternGraph(body, **constants), fuse_eager_attention)
    return reason


def test_refuses_scores_without_a_mask() -> None:
    assert _refused(lambda x: _weigh(_scores(x), x)) == "the attention is not causal: its scores are not masked"


def test_refuses_a_mask_that_is_not_causal() -> None:
    mask = torch.zeros(32, 32)
    assert _refused(added, mask=mask) == "the mask is not causal: of 5 positions, query 0 sees key 1"


def test_refuses_a_bias_on_the_scores() -> None:
    mask = torch.full((32, 32), 0.5)
    assert _refused(added, mask=mask) == "the mask adds 0.5 to a score, expected 0 or less than -10000.0"


def test_refuses_a_mask_for_each_head() -> None:
    def body(x: Any, mask: Any) -> Any:
        tokens = aten.sym_size.int(x, 0)
        cut = aten.slice.Tensor(aten.slice.Tensor(mask, 1, 0, tokens), 2, 0, tokens)
        return _weigh(aten.add.Tensor(_scores(x), cut), x)

    reason = _refused(body, mask=torch.zeros(2, 32, 32))
    assert reason == "the mask of 5 tokens has shape [2, 5, 5], expected one [tokens, tokens] for all heads"


def test_refuses_a_mask_from_the_checkpoint() -> None:
    assert "it depends on mask, whose values are not known" in _refused(added, mask=(32, 32))


def test_refuses_masked_scores_that_stay_visible() -> None:
    reason = _refused(buffer, mask=ALLOWED, hidden=torch.tensor(-1.0))
    assert reason == "masked scores become -1.0, expected less than -10000.0"


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


def test_refuses_scores_that_are_scaled_after_the_mask() -> None:
    def body(x: Any, mask: Any) -> Any:
        return _weigh(aten.mul.Tensor(aten.add.Tensor(_scores(x), _cut(mask, x)), 0.5), x)

    mask = torch.triu(torch.full((32, 32), float("-inf")), 1)
    assert _refused(body, mask=mask) == "the scores are multiplied by 0.5 after the mask or the softcap"


def test_refuses_two_masks() -> None:
    def body(x: Any, mask: Any) -> Any:
        return _weigh(aten.add.Tensor(aten.add.Tensor(_scores(x), _cut(mask, x)), _cut(mask, x)), x)

    mask = torch.triu(torch.full((32, 32), float("-inf")), 1)
    assert _refused(body, mask=mask) == "the scores are masked twice"


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
