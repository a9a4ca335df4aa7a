"""Generated loops compute what the graph's eager reference computes: random graphs, and every operation by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx

from llmc.codegen.cpp.lowering import lower
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import ELEMENTARY
from llmc.graph.verify import legal_ops
from llmc.options import BuildOptions
from llmc.targets import host_target
from tests.codegen.engine_harness import run_engine
from tests.codegen.random_graphs import random_graph
from tests.codegen.tiny_models import CHANNELS, VOCABULARY, GraphBuilder, aten, ops

# One token, a prime number of them, and enough for several parallel ranges.
STEPS = tuple((Chunk(0, 0, tuple(i % VOCABULARY for i in range(n))),) for n in (1, 11, 400))


def worst_difference(graph: ModelGraph, source: MemorySource, directory: Path) -> float:
    lowered = lower(graph, host_target(), BuildOptions(max_logit_rows=512))
    got = run_engine(lowered, source, STEPS, host_target(), directory, threads=2)
    want = run_steps(graph, source, STEPS)
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    assert all(torch.isfinite(b).all() for _, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    assert worst_difference(*random_graph(seed, 40), tmp_path) < 1e-5


Apply = Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node]


def _scalar(name: str, overload: str, *values: float) -> Apply:
    return lambda b, x, y: b.call(getattr(getattr(aten, name), overload), x, *values)


def _pair(name: str, overload: str = "Tensor") -> Apply:
    return lambda b, x, y: b.call(getattr(getattr(aten, name), overload), x, y)


def _of_positive(name: str, overload: str = "default", *rest: float) -> Apply:
    def build(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
        positive = b.call(aten.add.Tensor, b.call(aten.abs.default, x), 0.1)
        return b.call(getattr(getattr(aten, name), overload), positive, *rest)

    return build


def _mask(compare: str, overload: str = "Tensor") -> Apply:
    def build(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
        return b.call(aten.where.self, b.call(getattr(getattr(aten, compare), overload), x, y), x, y)

    return build


def _combined_mask(join: Apply) -> Apply:
    def build(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
        joined = join(b, b.call(aten.gt.Scalar, x, 0.2), b.call(aten.lt.Scalar, y, 0.3))
        return b.call(aten.masked_fill.Scalar, x, joined, -2.0)

    return build


def _reduced(name: str, overload: str) -> Apply:
    return lambda b, x, y: b.call(aten.sub.Tensor, y, b.call(getattr(getattr(aten, name), overload), x, [-1], True))


def _stacked(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    halves = [b.call(aten.slice.Tensor, x, 1, i, CHANNELS, 2) for i in range(2)]
    pairs = b.call(aten.stack.default, [b.call(aten.neg.default, halves[1]), halves[0]], -1)
    return b.call(aten.reshape.default, pairs, [-1, CHANNELS])


def _expanded(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    first = b.call(aten.slice.Tensor, x, 1, 0, 1)
    return b.call(aten.mul.Tensor, b.call(aten.expand.default, first, [-1, CHANNELS]), y)


def _integers(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    shifted = b.call(aten.sub.Tensor, b.call(aten.mul.Tensor, b.inputs["positions"], 3), 7)
    wrapped = b.call(
        aten.add.Tensor, b.call(aten.remainder.Scalar, shifted, 5), b.call(aten.floor_divide.default, shifted, 4)
    )
    number = b.call(aten._to_copy.default, wrapped, dtype=torch.float32)
    return b.call(aten.mul.Tensor, b.call(aten.unsqueeze.default, number, -1), x)


def _looked_up(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    places = b.call(aten.clamp.default, b.call(aten.add.Tensor, b.inputs["positions"], 2), 0, 63)
    return b.call(ops.embedding.default, places, b.weight("places", 64, CHANNELS, scale=1.0))


def _rounded(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    half = b.call(aten.to.dtype, x, torch.bfloat16)
    return b.call(aten._to_copy.default, b.call(aten.clone.default, half), dtype=torch.float32)


def _filled(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    fills = (
        b.call(aten.full_like.default, x, 0.5),
        b.call(aten.full.default, [CHANNELS], 2.0),
        b.call(aten.scalar_tensor.default, -3.0),
        b.call(aten.zeros_like.default, y),
        b.call(aten.ones_like.default, y),
    )
    for fill in fills:
        x = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, x, fill))
    return x


def _softmax(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.call(aten._softmax.default, x, -1, False), y)


def _negated_mask(name: str) -> Apply:
    def build(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
        return b.call(aten.where.self, b.call(getattr(aten, name).default, b.call(aten.ge.Tensor, x, y)), x, y)

    return build


OPERATIONS: dict[str, Apply] = {
    **{
        name: _scalar(name, "default")
        for name in ("neg", "abs", "exp", "expm1", "tanh", "sigmoid", "silu", "relu", "erf")
    },
    **{name: _scalar(name, "default") for name in ("gelu", "sin", "cos", "floor", "ceil", "square", "softplus")},
    "gelu_tanh": lambda b, x, y: b.call(aten.gelu.default, x, approximate="tanh"),
    **{name: _of_positive(name) for name in ("sqrt", "rsqrt", "log", "log1p", "reciprocal")},
    "power": _of_positive("pow", "Tensor_Scalar", 1.7),
    **{f"pow_{n}": _scalar("pow", "Tensor_Scalar", n) for n in (2, 3)},
    **{f"root_{n}": _of_positive("pow", "Tensor_Scalar", n) for n in (0.5, -0.5, -1)},
    "exponential": lambda b, x, y: b.call(aten.pow.Tensor_Tensor, b.call(aten.pow.Scalar, 2.0, x), y),
    **{name: _pair(name) for name in ("add", "sub", "mul")},
    **{name: _pair(name, "default") for name in ("maximum", "minimum")},
    "scaled_sum": lambda b, x, y: b.call(aten.add.Tensor, x, y, alpha=0.25),
    "reversed_difference": _scalar("rsub", "Scalar", 1.5),
    "quotient": _scalar("div", "Tensor", 3.0),
    "floored_quotient": lambda b, x, y: b.call(aten.div.Tensor_mode, x, 0.3, rounding_mode="floor"),
    "truncated_quotient": lambda b, x, y: b.call(aten.div.Tensor_mode, x, 0.3, rounding_mode="trunc"),
    **{f"where_{name}": _mask(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: _combined_mask(_pair(name, "default")) for name in ("logical_and", "logical_or")},
    **{name: _combined_mask(_pair(name)) for name in ("bitwise_and", "bitwise_or")},
    **{name: _negated_mask(name) for name in ("bitwise_not", "logical_not")},
    "clamp": _scalar("clamp", "default", -0.5, 0.75),
    "clamp_min": _scalar("clamp_min", "default", -0.5),
    "clamp_max": _scalar("clamp_max", "default", 0.5),
    "sum": _reduced("sum", "dim_IntList"),
    "mean": _reduced("mean", "dim"),
    "amax": _reduced("amax", "default"),
    "amin": _reduced("amin", "default"),
    "softmax": _softmax,
    "fills": _filled,
    "stack": _stacked,
    "expand": _expanded,
    "integers": _integers,
    "embedding of computed ids": _looked_up,
    "rounding": _rounded,
}


def test_every_operation(tmp_path: Path) -> None:
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("x", VOCABULARY, CHANNELS, scale=1.0))
    y = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("y", VOCABULARY, CHANNELS, scale=1.0))
    results = [build(b, x, y) for build in OPERATIONS.values()]
    joined = b.call(aten.cat.default, results, 1)
    graph, source = b.finish(b.call(ops.select_rows.default, joined, b.inputs["logit_rows"]))
    called = {n.target for n in graph.graph.nodes if n.op == "call_function"}
    assert called <= legal_ops(graph.stage) | {aten.clone.default}  # what can be emitted is legal
    lowered = lower(graph, host_target(), BuildOptions(max_logit_rows=512))
    got = torch.cat([rows for step in run_engine(lowered, source, STEPS, host_target(), tmp_path) for rows in step])
    want = torch.cat([rows for step in run_steps(graph, source, STEPS) for rows in step])
    for i, name in enumerate(OPERATIONS):
        columns = slice(i * CHANNELS, (i + 1) * CHANNELS)
        difference = (got[:, columns] - want[:, columns]).abs() / (1 + want[:, columns].abs())
        assert difference.max() < 2e-6, name


def test_no_operation_is_left_out() -> None:
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("x", VOCABULARY, CHANNELS, scale=1.0))
    for build in OPERATIONS.values():
        build(b, x, x)
    tried = {str(node.target).rpartition(".")[0] for node in b.graph.nodes}
    assert {str(operation).rpartition(".")[0] for operation in ELEMENTARY} <= tried


def test_functions_of_extreme_numbers(tmp_path: Path) -> None:
    b = GraphBuilder()
    inf, values = float("inf"), torch.linspace(-110, 110, CHANNELS)
    values[:12] = torch.tensor([inf, -inf, float("nan"), 0.0, -0.0, 88.7, 88.8, -87.4, -103.0, 1e-30, -1e-30, 1e30])
    extremes = b.constant("extremes", values)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.constant("zeros", torch.zeros(VOCABULARY, CHANNELS)))
    functions = ("exp", "tanh", "sigmoid", "erf")
    shifted = b.call(aten.add.Tensor, x, extremes)
    results = [b.call(getattr(aten, name).default, shifted) for name in functions]
    joined = b.call(aten.cat.default, results, 1)
    graph, source = b.finish(b.call(ops.select_rows.default, joined, b.inputs["logit_rows"]))
    lowered = lower(graph, host_target(), BuildOptions())
    ((got,),) = run_engine(lowered, source, STEPS[:1], host_target(), tmp_path)
    want = torch.cat([getattr(torch, name)(values) for name in functions])[None]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-7, equal_nan=True)
