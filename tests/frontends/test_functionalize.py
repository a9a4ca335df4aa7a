"""Functionalization without replaying the graph: the same ops as run_decompositions, and the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export

from llmc.frontends.capture import capture
from llmc.frontends.tracing.functionalize import functionalize
from llmc.options import BuildOptions
from tests.tiny_models import tiny_model

aten = torch.ops.aten


class Steps(nn.Module):
    """x: [1, T, 8] through one function."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, T, 8]."""
        return self.step(x) * 2


def exported(step: Callable[[Tensor], Tensor]) -> ExportedProgram:
    """The training form that export gives, which functionalize takes over."""
    return export(Steps(step).eval(), (torch.zeros(1, 7, 8),), dynamic_shapes=({1: Dim.DYNAMIC},), strict=False)


def ops(program: ExportedProgram) -> set[str]:
    """The tensor ops of a program, less the final product and what checks or measures sizes."""
    called = {str(node.target) for node in program.graph.nodes if isinstance(node.target, OpOverload)}
    return called - {"aten.mul.Tensor", "aten.sym_size.int", "aten._assert_tensor_metadata.default"}


def swap_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), -1)


def add_in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y += x
    return y


def share_of_the_best(x: Tensor) -> Tensor:
    """As routers do."""
    best, _ = x.topk(2)
    best /= best.sum(-1, keepdim=True)
    return best.flatten(1)


def read_before_and_after(x: Tensor) -> Tensor:
    y = x.exp()
    before = y * 3
    y.mul_(x)
    return before + y


def seen_through_a_view(x: Tensor) -> Tensor:
    y = x.exp()
    part = y[..., :4]
    y += x
    return part


def filled_from_the_middle(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    y[..., 2:] = x[..., 2:].exp()
    y[..., :2] = x[..., 6:]
    return y


def filled_out_of_turn(x: Tensor) -> Tensor:
    """The first slice is filled last."""
    y = x.new_zeros(x.shape)
    first, second = y[..., :5], y[..., 3:]
    second.copy_(x[..., 3:])
    first.copy_(x[..., :5] * 2)
    return y


def read_and_filled(x: Tensor) -> Tensor:
    """What a slice was is read before it is filled."""
    y = x.new_zeros(x.shape)
    first = y[..., :5]
    before = first + 1
    first.copy_(x[..., :5])
    return torch.cat((before, y), -1)


DROPOUT = nn.Dropout(0.5).eval()

SCATTER = "aten.slice_scatter.default"
CASES: list[tuple[Callable[[Tensor], Tensor], set[str]]] = [
    (lambda x: x.float(), set()),
    (lambda x: x.to(torch.bfloat16), {"aten._to_copy.default"}),
    (lambda x: x.contiguous(), set()),
    (lambda x: x.transpose(1, 2).contiguous(), {"aten.transpose.int", "aten.clone.default"}),
    (lambda x: x.reshape(1, -1, 2, 4), {"aten.view.default"}),
    (lambda x: x[..., :4].reshape(1, -1, 2, 2), {"aten.slice.Tensor", "aten.view.default"}),
    (lambda x: x.transpose(1, 2).reshape(-1), {"aten.transpose.int", "aten.clone.default", "aten.view.default"}),
    (swap_halves, {"aten.split.Tensor", "aten.cat.default"}),
    (lambda x: DROPOUT(x), set()),
    (lambda x: x.flatten(1), {"aten.view.default"}),
    (add_in_place, {"aten.exp.default", "aten.add.Tensor"}),
    (share_of_the_best, {"aten.topk.default", "aten.sum.dim_IntList", "aten.div.Tensor", "aten.view.default"}),
    (read_before_and_after, {"aten.exp.default", "aten.add.Tensor"}),
    (filled_from_the_middle, {"aten.new_empty.default", "aten.slice.Tensor", "aten.exp.default", SCATTER}),
    (filled_out_of_turn, {"aten.new_zeros.default", "aten.slice.Tensor", "aten.copy.default", SCATTER}),
    (
        read_and_filled,
        {
            "aten.new_zeros.default",
            "aten.slice.Tensor",
            "aten.add.Tensor",
            "aten.copy.default",
            "aten.cat.default",
            SCATTER,
        },
    ),
    (seen_through_a_view, {"aten.exp.default", "aten.add.Tensor", "aten.slice.Tensor"}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_plain_ops_and_the_same_values(case: int) -> None:
    step, expected = CASES[case]
    program = functionalize(exported(step))
    assert ops(program) == expected
    for tokens in (1, 5):
        x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(program.module(check_guards=False)(x), Steps(step).eval()(x))


def test_few_are_replayed() -> None:
    replayed = {step for step, _ in CASES if functionalize(program := exported(step)) is not program}
    assert replayed == {filled_out_of_turn, read_and_filled, seen_through_a_view}


def test_the_shipped_rules_give_what_a_replay_gives() -> None:
    def calls() -> Counter[str]:
        graph = capture(tiny_model("mixtral", num_hidden_layers=1), BuildOptions()).graph.graph
        return Counter(str(node.target) for node in graph.nodes)

    captured = calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.frontends.tracing.trace.functionalize", lambda program: program.run_decompositions({}))
        replayed = calls()
    assert captured == replayed


def test_new_nodes_keep_value_and_origin() -> None:
    program = functionalize(exported(lambda x: x.transpose(1, 2).reshape(-1)))
    (view,) = program.graph.find_nodes(op="call_function", target=aten.view.default)
    (clone,) = program.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.meta["val"].is_contiguous()
    assert clone.meta["val"].shape[1] == 8
    assert view.meta["val"].dim() == 1
    assert "in forward" in view.meta["stack_trace"]
