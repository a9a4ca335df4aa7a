"""No op is left out of what coverage counts: it has a rule, by its record or its name, or a reason why it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmc.graph.op_record import RECORDS, OpRecord, Part
from llmc.graph.stage import Stage
from llmc.ops.registry import LOOKUP, PRODUCT
from llmc.report.coverage.rule import CoverageRule
from llmc.report.coverage.rules import RULES, WITHOUT_RULE
from tests.graph_builder import GraphBuilder

ops = torch.ops.llmc
# Ops that only fusion makes are counted where their passes have a rule.
COUNTED = {op: record for op, record in RECORDS.items() if record.stages & {Stage.CANONICAL, Stage.SERVING}}


def rules_about(record: OpRecord) -> set[str]:
    return {f"{rule.what} {rule.verb}" for rule in RULES if rule.done(record) or rule.left_ops(record)}


def rule(what: str) -> CoverageRule:
    (named,) = (candidate for candidate in RULES if f"{candidate.what} {candidate.verb}" == what)
    return named


@pytest.mark.parametrize("record", COUNTED.values(), ids=lambda record: record.name)
def test_an_op_has_a_rule_or_a_reason(record: OpRecord) -> None:
    assert bool(rules_about(record)) != (record.overload in WITHOUT_RULE)


def test_reasons_are_about_ops_that_graphs_hold() -> None:
    assert set(WITHOUT_RULE) <= set(COUNTED)


def test_a_record_says_what_counts() -> None:
    new = RECORDS[ops.select_channels.default]
    assert rules_about(new) == set()
    product, experts = replace(new, takes=PRODUCT), replace(new, takes=PRODUCT, share=new.flops)
    assert rules_about(product) == {"products with a weight recognised", "products quantized"}
    assert rules_about(experts) == {"products with experts' weights recognised", "products quantized"}
    assert rules_about(replace(new, takes=LOOKUP)) == {"embeddings recognised"}
    assert rules_about(replace(new, part=Part.STORAGE)) == {"readers of quantized weights computed on their codes"}
    assert rules_about(replace(new, fallback="states")) == {"states kept between steps"}
    kept = [op for op, record in RECORDS.items() if "states kept between steps" in rules_about(record)]
    assert ops.linear_attention_with_state.default in kept and len(kept) == 8


def test_products_of_experts_count_by_themselves() -> None:
    b = GraphBuilder()
    x, index = b.embedded(), b.call(torch.ops.aten.full.default, [6, 2], 0, dtype=torch.int64)
    sent = b.call(ops.expert_linear.default, x, b.weight("experts", 12, 8), None, index, 3)
    left = b.call(torch.ops.aten.bmm.default, b.call(torch.ops.aten.unsqueeze.default, x, 0), b.weight("one", 1, 8, 8))
    graph, _ = b.finish(b.linear(x, "up", 8))
    experts, others = rule("products with experts' weights recognised"), rule("products with a weight recognised")
    assert sent.name and (experts.number_done(graph), experts.left(graph)) == (1, [left])
    assert (others.number_done(graph), others.left(graph)) == (2, [])


def test_states_count_once_they_are_kept() -> None:
    b = GraphBuilder()
    x = b.embedded()
    open_ones = b.call(ops.causal_conv.default, x, b.weight("conv", 3, 8))
    graph, _ = b.finish(open_ones)
    states = rule("states kept between steps")
    assert (states.number_done(graph), states.left(graph)) == (0, [open_ones])
