"""Where the hidden states of a graph are: the last one before the last norm, or that norm where layers end in one."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from llmc.passes.speculative.residual_stream import hidden_states
from tests.graph_builder import GraphBuilder

aten = torch.ops.aten


def attended(b: GraphBuilder, h: fx.Node, name: str) -> fx.Node:
    """The residual stream after an attention over it."""
    q, k, v = (
        b.call(aten.reshape.default, b.linear(h, f"{name}.{part}", heads * 4), [-1, heads, 4])
        for part, heads in (("q", 2), ("k", 1), ("v", 1))
    )
    y = b.call(aten.reshape.default, b.call(torch.ops.llmc.attention.default, q, k, v, 0.5), [-1, 8])
    return b.call(aten.add.Tensor, h, y)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("ends_in_norm", [True, False])
def test_the_last_state(layers: int, ends_in_norm: bool) -> None:
    b = GraphBuilder()
    states = [b.embedded()]
    for number in range(layers):
        after = attended(b, states[-1], f"layers.{number}")
        states.append(b.rms_norm(after, f"norms.{number}") if ends_in_norm else after)
    graph, _ = b.finish(states[-1] if ends_in_norm else b.rms_norm(states[-1], "norm"))
    assert [str(node) for node in hidden_states(graph)] == [state.name for state in states]
