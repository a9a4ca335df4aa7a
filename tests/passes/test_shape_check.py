"""A pass that breaks a shape is stopped where it did, before a kernel reads memory by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.codegen.target_kind import kind_of
from llmc.compiler import packed
from llmc.debug.check_passes import PassChecker
from llmc.errors import LoweringError, PassError
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.runner import run_pipeline
from llmc.program import Layout, WeightSlot
from llmc.targets import REFERENCE, resolve_target
from tests.graph_builder import llama

aten, ops = torch.ops.aten, torch.ops.llmc


def pass_over(change: Callable[[ModelGraph, Any], None]) -> GraphPass:
    """A pass that changes the first product of a graph, as a user's would."""

    def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        product = graph.graph.find_nodes(op="call_function", target=ops.linear.default)[0]
        log.step("change", product)
        change(graph, product)

    return GraphPass("narrow", run)


def half_the_rows(graph: ModelGraph, product: Any) -> None:
    """Fits its inputs, and makes half the channels that its readers were made for."""
    x, weight, *rest = product.args
    with graph.graph.inserting_before(product):
        half = graph.graph.call_function(aten.slice.Tensor, (weight, 0, 0, weight.meta["val"].shape[0] // 2))
    product.args = (x, half, *rest)


def half_the_columns(graph: ModelGraph, product: Any) -> None:
    """Does not fit its inputs."""
    x, weight, *rest = product.args
    with graph.graph.inserting_before(product):
        half = graph.graph.call_function(aten.slice.Tensor, (weight, 1, 0, weight.meta["val"].shape[1] // 2))
    product.args = (x, half, *rest)


def another_value(graph: ModelGraph, product: Any) -> None:
    """Says of itself what is not so."""
    product.meta["val"] = product.meta["val"][:, :1]


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("change", [half_the_rows, half_the_columns, another_value])
def test_a_broken_shape_is_named(change: Callable[[ModelGraph, Any], None], checks: bool) -> None:
    graph, source = llama()
    observer = PassChecker(graph, source) if checks else None
    with pytest.raises(PassError, match=r"^pass narrow: .*linear") as caught:
        run_pipeline(graph, (pass_over(change),), BuildOptions(check_passes=checks), observer)
    if change is half_the_rows:
        assert "and the graph has it as float32[" in caught.value.problem


def test_a_changed_value_is_checked_where_it_is_read() -> None:
    """A pass that gives a weight another shape breaks what reads it."""

    def narrow(graph: ModelGraph, product: Any) -> None:
        weight = product.args[1]
        value = weight.meta["val"]
        weight.meta["val"] = value[: value.shape[0] // 2]

    graph, _ = llama()
    with pytest.raises(PassError, match=r"^pass narrow: node linear"):
        run_pipeline(graph, (pass_over(narrow),), BuildOptions())


def test_a_graph_that_does_not_run_is_an_error_of_the_pass() -> None:
    graph, source = llama()
    checker = PassChecker(graph, source)

    def forget(graph: ModelGraph, product: Any) -> None:
        graph.weights[str(product.args[1])] = Stored("lm_head", torch.float32)

    with pytest.raises(PassError, match="the graph does not run after pass narrow: "):
        run_pipeline(graph, (pass_over(forget),), BuildOptions(), checker)


def test_a_recipe_makes_what_its_placeholder_says() -> None:
    slot = WeightSlot("w", "F32", (4, 3), Layout.ROWS, 48)
    source = MemorySource({"w": torch.ones(4, 2)})
    with pytest.raises(PassError, match=r"weight w is \[4, 2\], but the graph has \[4, 3\]"):
        packed(slot, Stored("w", torch.float32), source, FiniteWeights(), kind_of(REFERENCE))


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_ids_that_32_bits_do_not_hold_are_named(number: int) -> None:
    slot = WeightSlot("table", "I32", (2,), Layout.ROWS, 8)
    source = MemorySource({"ids": torch.tensor([5, number])})
    with pytest.raises(LoweringError, match=rf"table holds numbers from .*{number}.* 32 bits") as caught:
        packed(slot, Stored("ids", torch.int64), source, FiniteWeights(), kind_of(resolve_target("cpu")))
    assert caught.value.at == "ids"


def test_ids_that_32_bits_do_hold_are_kept() -> None:
    ids = torch.tensor([-(2**31), 2**31 - 1])
    slot, source = WeightSlot("table", "I32", (2,), Layout.ROWS, 8), MemorySource({"ids": ids})
    content = packed(slot, Stored("ids", torch.int64), source, FiniteWeights(), kind_of(resolve_target("cpu")))
    assert content.tolist() == ids.tolist()
