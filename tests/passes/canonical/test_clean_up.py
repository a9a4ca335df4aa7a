"""Folding of constants, merging of duplicates, positions from the input, and the layout of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.options import BuildOptions
from llmc.passes.canonical.fold_constants import fold_constants
from llmc.passes.canonical.merge_duplicates import merge_duplicates
from llmc.passes.canonical.positions_input import positions_input
from llmc.passes.canonical.simplify_layout import simplify_layout
from llmc.passes.example import Example
from llmc.passes.recorded_graph import recorded_copy
from llmc.passes.rewrite_log import RewriteLog
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten, ops = torch.ops.aten, torch.ops.llmc
Golden = Callable[[str, str], None]


def test_folds_weights_and_numbers(golden: Golden) -> None:
    def body(x: Any, weight: Any, matrix: Any, scale: Any) -> Any:
        x = aten.mul.Tensor(x, aten.add.Tensor(weight, 1.0))
        x = aten.linear.default(x, aten.transpose.int(matrix, 0, 1))
        return aten.div.Tensor(x, aten.mul.Tensor(scale, 2.0))

    made = PatternGraph(body, weight=(WIDTH,), matrix=(WIDTH, WIDTH), scale=torch.tensor(0.5))
    golden("passes/fold_constants.txt", rewritten(made, fold_constants))


def test_does_not_fold_what_makes_the_file_bigger() -> None:
    def body(x: Any, matrix: Any) -> Any:
        wide = aten.linear.default(x, aten.cat.default([matrix] * 40, 0))
        return aten.slice.Tensor(wide, 1, 0, WIDTH)

    (reason,) = refusals(PatternGraph(body, matrix=(1024, WIDTH)), fold_constants)
    assert reason == f"folding makes {40 * 1024 * WIDTH * 4} bytes of weights out of {1024 * WIDTH * 4}"


def test_merges_duplicates(golden: Golden) -> None:
    def body(x: Any) -> Any:
        first, second = (aten.sub.Tensor(x, aten.mean.dim(x, [-1], True)) for _ in range(2))
        return aten.mul.Tensor(first, aten.exp.default(second))

    golden("passes/merge_duplicates.txt", rewritten(PatternGraph(body), merge_duplicates))


def test_does_not_merge_calls_with_other_arguments() -> None:
    def body(x: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(x, 2.0), aten.mul.Tensor(x, 3.0))

    assert refusals(PatternGraph(body), merge_duplicates) == []


def test_positions_come_from_the_input(golden: Golden) -> None:
    def body(x: Any, table: Any, other: Any) -> Any:
        tokens = aten.sym_size.int(x, 0)
        counted = aten.arange.start(0, tokens, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
        x = aten.add.Tensor(x, aten.embedding.default(table, counted))
        angles = aten.unsqueeze.default(aten.arange.default(tokens, dtype=torch.float32), 1)
        return aten.add.Tensor(aten.mul.Tensor(x, angles), aten.slice.Tensor(other, 0, 0, tokens))

    made = PatternGraph(body, table=(64, WIDTH), other=(64, WIDTH))
    golden("passes/positions_input.txt", rewritten(made, positions_input))


def test_positions_that_start_later_are_refused() -> None:
    def body(x: Any, table: Any) -> Any:
        end = aten.sym_size.int(x, 0) + 2
        return aten.add.Tensor(x, aten.embedding.default(table, aten.arange.start(2, end)))

    reasons = refusals(PatternGraph(body, table=(64, WIDTH)), positions_input)
    assert reasons == ["positions count from 2 in steps of 1, expected from 0 in steps of 1"]


def test_rows_of_the_step_are_not_positions() -> None:
    def body(x: Any) -> Any:
        return aten.index_select.default(x, 0, aten.arange.default(aten.sym_size.int(x, 0)))

    (reason,) = refusals(PatternGraph(body), positions_input)
    assert "aten.index_select.default) uses arange(T) for something else than positions" in reason


def test_transposes_meet_and_vanish(golden: Golden) -> None:
    def body(x: Any, weight: Any) -> Any:
        heads = aten.transpose.int(aten.reshape.default(aten.reshape.default(x, [-1, 4, 2]), [-1, 2, 4]), 0, 1)
        heads = torch.ops.llmc.rms_norm.default(heads, weight, 1e-6)
        first, second = aten.slice.Tensor(heads, 2, 0, 2), aten.slice.Tensor(heads, -1, 2, 4)
        heads = aten.mul.Tensor(aten.cat.default([second, first], 2), 2.0)
        heads = aten.squeeze.dim(aten.unsqueeze.default(aten.add.Tensor(heads, heads), 0), 0)
        return aten.reshape.default(aten.transpose.int(heads, 0, 1), [-1, WIDTH])

    made = PatternGraph(body, weight=(WIDTH // 2,))
    golden("passes/simplify_layout.txt", rewritten(made, simplify_layout))


def test_transposes_pass_reshapes_of_later_axes() -> None:
    """As halves that lie in turn were put apart in DeepSeek's rotation, of heads and of keys that all heads share."""

    def body(x: Any) -> Any:
        heads = aten.transpose.int(aten.reshape.default(x, [-1, 2, 4]), 0, 1)
        parts = aten.transpose.int(aten.reshape.default(heads, [2, -1, 2, 2]), 2, 3)
        shared = aten.transpose.int(aten.reshape.default(x, [1, -1, 2, 4]), 2, 3)
        heads = aten.transpose.int(aten.reshape.default(parts, [2, -1, 4]), 0, 1)
        shared = aten.transpose.int(aten.reshape.default(shared, [1, -1, 8]), 0, 1)
        return aten.add.Tensor(aten.reshape.default(heads, [-1, WIDTH]), aten.reshape.default(shared, [-1, WIDTH]))

    text = rewritten(PatternGraph(body), simplify_layout)
    assert "[2, T" not in text and "[1, T" not in text


def test_transposes_pass_what_takes_any_axes_in_front() -> None:
    """And no op to which the first axis is the tokens and the second one the heads."""

    def body(x: Any, weight: Any) -> tuple[Any, Any]:
        heads = aten.transpose.int(x, 0, 1)
        return ops.gated_activation.default(heads, heads, "silu"), ops.head_linear.default(heads, weight)

    graph, nodes = recorded_copy(Example(body, {"x": (2, "T", 4), "weight": (2, 3, 4)}).graph())
    log = RewriteLog(nodes, None)
    log.begin_pass(simplify_layout.name)
    simplify_layout.run(graph, BuildOptions(), log)
    returned: Any = graph.graph.output_node().args[0]
    gated, products = returned
    assert gated.target is aten.transpose.int and gated.args[0].target is ops.gated_activation.default
    assert products.target is ops.head_linear.default and products.args[0].target is aten.transpose.int


def test_transposes_pass_casts_of_rows_that_get_a_batch() -> None:
    """As Ministral 3 scales queries by their positions."""

    def body(x: Any, positions: Any) -> Any:
        scale = aten.unsqueeze.default(aten.unsqueeze.default(aten.mul.Tensor(positions, 0.5), 0), 2)
        scale = aten._to_copy.default(scale, dtype=torch.bfloat16)
        heads = aten.reshape.default(x, [-1, 2, 4])
        return aten.reshape.default(aten.mul.Tensor(heads, aten.transpose.int(scale, 0, 1)), [-1, WIDTH])

    assert "[1, T" not in rewritten(PatternGraph(body, torch.bfloat16), simplify_layout)


def test_a_cast_there_and_back_vanishes_only_if_it_loses_nothing() -> None:
    def body(x: Any) -> Any:
        wide = aten._to_copy.default(aten._to_copy.default(x, dtype=torch.float32), dtype=torch.bfloat16)
        return aten._to_copy.default(aten._to_copy.default(wide, dtype=torch.float16), dtype=torch.bfloat16)

    text = rewritten(PatternGraph(body, torch.bfloat16), simplify_layout)
    assert text.count("aten._to_copy") == 2
    assert "float16[" in text
