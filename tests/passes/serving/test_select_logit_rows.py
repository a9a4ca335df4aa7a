"""Logits of the requested rows only: how far up the selection moves, and what stops it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmc.errors import PassError
from llmc.graph.execute import interpret, run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.graph.weights import evaluate
from llmc.options import BuildOptions
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.passes.serving.select_logit_rows import select_logit_rows
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import rewrites, same_logits

aten = torch.ops.aten


def test_moves_up_to_the_last_attention(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=2)
    result = _served(graph)
    golden("passes/select_logit_rows.txt", render(result.graph))
    same_logits(graph, result.graph, source, tolerance=1e-6)
    assert rewrites(_served(result.graph).records) == 0


@pytest.mark.parametrize("rows", [[6], [4, 0, 2]])
def test_gives_the_rows_asked_for(rows: list[int]) -> None:
    graph, source = llama(layers=1)
    tokens = [5, 3, 11, 2, 7, 1, 16]
    wanted = run_tokens(graph, source, tokens)[rows]
    torch.testing.assert_close(_logits_of(_served(graph).graph, source, tokens, rows), wanted)


def test_moves_above_both_halves_of_a_split() -> None:
    b = GraphBuilder()
    both = b.linear(b.embedded(), "both", 16)
    halves = b.call(aten.split_with_sizes.default, both, [8, 8], -1)
    gate, up = b.part(halves, 0), b.part(halves, 1)
    graph, source = b.finish(b.call(torch.ops.llmc.gated_activation.default, gate, up, "silu"))
    result = _served(graph)
    same_logits(graph, result.graph, source, tolerance=1e-6)
    (selection,) = result.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.select_rows.default)
    assert selection.args[0].name == "embedding_default"


def test_moves_above_pointwise_ops_with_numbers_and_vectors() -> None:
    b = GraphBuilder()
    h = b.call(aten.mul.Tensor, b.embedded(), b.weight("scale", 8))
    logits = b.call(torch.ops.llmc.lm_head.default, h, b.embedding)
    capped = b.call(aten.mul.Tensor, b.call(aten.tanh.default, b.call(aten.div.Tensor, logits, 30.0)), 30.0)
    graph, source = b.finish_with(capped)
    result = _served(graph)
    same_logits(graph, result.graph, source, tolerance=1e-6)
    assert rewrites(result.records[1:]) == 6


def test_refuses_an_op_that_is_not_known_to_keep_rows_apart() -> None:
    b = GraphBuilder()
    h = b.embedded(width=4)
    graph, source = b.finish(b.linear(b.call(aten.cat.default, [h, h], -1), "down", 4))
    assert _refusal(graph, source) == "aten.cat.default is not known to keep rows apart"


@pytest.mark.parametrize("op", ["causal_conv", "linear_recurrence", "pool"])
def test_what_mixes_tokens_is_meant_to_end_it(op: str) -> None:
    b = GraphBuilder()
    h = b.embedded()
    given = {
        "causal_conv": b.weight("conv", 3, 8),
        "linear_recurrence": b.call(aten.sigmoid.default, h),
        "pool": "mean",
    }
    mixed = b.call(getattr(torch.ops.llmc, op).default, h, given[op])
    graph, _ = b.finish(b.linear(mixed, "down", 8))
    result = _served(graph)
    assert result.records[1].refusals == ()
    (selection,) = result.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.select_rows.default)
    assert selection.args[0].target is mixed.target


def test_refuses_an_op_along_the_tokens() -> None:
    b = GraphBuilder()
    graph, source = b.finish(b.call(aten.slice.Tensor, b.embedded(), 0, 0, 9223372036854775807))
    assert _refusal(graph, source) == "aten.slice.Tensor works on axis 0, not on the last of 2"


def test_refuses_an_operand_that_is_no_matrix() -> None:
    b = GraphBuilder()
    heads = b.call(aten.reshape.default, b.embedded(), [-1, 2, 4])
    graph, source = b.finish(b.linear(b.call(aten.sum.dim_IntList, heads, [-1]), "up", 8))
    assert "float32[T, 2, 4], not a matrix with one row per token" in _refusal(graph, source)


def test_moves_above_what_makes_a_mask() -> None:
    b = GraphBuilder()
    h = b.embedded()
    positive = b.call(aten.gt.Scalar, h, 0)
    graph, source = b.finish(b.call(aten.where.self, positive, h, b.call(aten.mul.Tensor, h, 0.1)))
    result = _served(graph)
    same_logits(graph, result.graph, source, tolerance=1e-6)
    (selection,) = result.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.select_rows.default)
    assert selection.args[0].name == "embedding_default"


def test_refuses_an_operand_that_is_no_number() -> None:
    """No kernel selects rows of ids or masks; here the mask is read by something that stays, too."""
    b = GraphBuilder()
    h = b.embedded()
    positive = b.call(aten.gt.Scalar, h, 0)
    rectified = b.call(aten.where.self, positive, h, b.call(aten.mul.Tensor, h, 0.0))
    wide = b.call(aten.cat.default, [b.call(aten._to_copy.default, positive, dtype=torch.float32), h], -1)
    total = b.call(aten.add.Tensor, rectified, b.call(aten.slice.Tensor, wide, 1, 0, 8))
    graph, source = b.finish(total)
    result = _served(graph)
    same_logits(graph, result.graph, source, tolerance=1e-6)
    reasons = [refusal.reason for refusal in result.records[1].refusals]
    assert "operand gt_scalar is bool[T, 8], whose rows cannot be selected" in reasons


def test_refuses_what_other_ops_need_whole() -> None:
    graph, source = llama(layers=2)
    assert _refusal(graph, source) == "all rows of add_tensor_1 are needed: it is used by rms_norm_default_2"


def test_fails_where_logits_are_not_one_row_a_token() -> None:
    with pytest.raises(PassError, match=r"the logits are float32\[2, 17\], not one row per token"):
        _served(_fixed_logits()[0])


def test_an_allowed_fallback_keeps_all_logits() -> None:
    graph, _ = _fixed_logits()
    result = run_pipeline(graph, (page_kv_cache, select_logit_rows), BuildOptions(allow_fallback=("logit_rows",)))
    assert [len(r.refusals) for r in result.records] == [0, 1]
    assert rewrites(result.records[1:]) == 0


def _served(graph: ModelGraph) -> PipelineResult:
    return run_pipeline(graph, (page_kv_cache, select_logit_rows), BuildOptions())


def _refusal(graph: ModelGraph, source: TensorSource) -> str:
    result = _served(graph)
    same_logits(graph, result.graph, source, tolerance=1e-6)
    (refusal,) = result.records[1].refusals
    return refusal.reason


def _fixed_logits() -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    h = b.embedded()
    first = b.call(aten.slice.Tensor, h, 0, 0, 2)
    return b.finish(first)


def _logits_of(graph: ModelGraph, source: TensorSource, tokens: list[int], rows: list[int]) -> Tensor:
    """One step of a whole sequence in one block, with the logits of some rows."""
    count = len(tokens)
    values: dict[str, list[int] | list[list[int]]] = {
        "input_ids": tokens,
        "positions": list(range(count)),
        "slot_mapping": list(range(count)),
        "query_starts": [0, count],
        "context_lens": [count],
        "block_tables": [[0]],
        "logit_rows": rows,
    }
    inputs = {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}
    inputs["tree_masks"] = torch.zeros(count, dtype=torch.int64)
    caches = {
        n.name: torch.zeros(1, *(int(s) for s in n.meta["val"].shape[1:])) for n in graph.inputs() if "cache" in n.meta
    }
    weights = {n.name: evaluate(graph.weights[n.name], source) for n in graph.weight_nodes()}
    return interpret(graph, inputs | caches | weights)
