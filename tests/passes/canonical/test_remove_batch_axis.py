"""Captured modules lose their batch axis, through every kind of op that has a rule, and through one that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.canonical.normalize_ops import normalize_ops
from llmc.passes.canonical.remove_batch_axis import remove_batch_axis
from llmc.passes.canonical.remove_export_residue import remove_export_residue
from llmc.passes.runner import run_pipeline

Golden = Callable[[str, str], None]
PASSES = (remove_export_residue, normalize_ops, remove_batch_axis)


class Module(nn.Module):
    """Embedding, a body [1, T, 8] → [1, T, 8], and tied logits."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8)
        self.table.weight.data = torch.randn(17, 8, generator=torch.Generator().manual_seed(3))
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [1, T]."""
        logits: Tensor = self.body(self.table(ids)) @ self.table.weight.t()
        return logits


def _captured(body: Callable[[Tensor], Tensor]) -> Captured:
    return capture(Module(body), BuildOptions())


def _unbatched(captured: Captured) -> ModelGraph:
    graph = run_pipeline(captured.graph, PASSES, BuildOptions()).graph
    for length in (5, 12):
        tokens = [(3 + 5 * i) % 17 for i in range(length)]
        before = run_tokens(captured.graph, captured.source, tokens)
        torch.testing.assert_close(run_tokens(graph, captured.source, tokens), before, rtol=0, atol=1e-5)
    again = run_pipeline(graph, PASSES, BuildOptions())
    assert sum(len(r.rewrites) for r in again.records) == 0
    return graph


def _has_batch_axis(graph: ModelGraph) -> bool:
    values: list[Any] = [n.meta.get("val") for n in graph.graph.nodes if n.op != "output"]
    shapes: list[list[Any]] = [list(v.shape) for v in values if isinstance(v, Tensor)]
    return any(len(s) > 1 and isinstance(s[1], SymInt) and s[0] == 1 for s in shapes)


def test_every_op_with_a_rule(golden: Golden) -> None:
    def body(x: Tensor) -> Tensor:
        b, t, c = x.shape
        heads = x.view(b, t, 2, c // 2).transpose(1, 2)
        scores = torch.softmax(heads @ heads.transpose(-2, -1), dim=-1)
        heads = scores @ heads + nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = heads.transpose(1, 2).reshape(b, t, c)
        x = torch.cat([x[..., 4:], x[..., :4]], dim=-1) + torch.stack([x[..., :4], x[..., 4:]], dim=-1).flatten(-2)
        x = x * x.mean(-1, keepdim=True) - x.sum(-1, keepdim=True) + x.amax(-1, keepdim=True)
        x = torch.where(x > 0, x, 0.5 * x).clamp(max=10)
        return nn.functional.layer_norm(x[0].unsqueeze(0), (c,)).repeat_interleave(2, dim=-1)[..., ::2]

    graph = _unbatched(_captured(body))
    assert not _has_batch_axis(graph)
    golden("passes/remove_batch_axis.txt", render(graph))


def test_a_mask_buffer_loses_its_axes_of_one_too() -> None:
    mask = torch.tril(torch.ones(32, 32))[None]

    def body(x: Tensor) -> Tensor:
        t = x.shape[1]
        scores = (x @ x.transpose(-2, -1)).masked_fill(mask[:, :t, :t] == 0, float("-inf"))
        return torch.softmax(scores, dim=-1) @ x

    text = render(_unbatched(_captured(body)))
    assert "float32[T, T] = aten.softmax.int" in text
    assert "float32[T, 8] = aten.matmul" in text


def test_what_follows_an_op_without_a_rule_still_loses_the_axis() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.flip(x, dims=[-1]).exp().log()

    graph = _unbatched(_captured(body))
    text = render(graph)
    assert "aten.flip(%unsqueeze" in text
    assert "float32[T, 8] = aten.exp" in text


def test_what_routers_choose() -> None:
    def body(x: Tensor) -> Tensor:
        values, index = x.topk(3, dim=-1)
        taken = torch.gather(x, 2, index)
        return torch.cat([values, taken, index[..., :2].to(x.dtype)], dim=-1)

    assert not _has_batch_axis(_unbatched(_captured(body)))
