"""Every rule of a pass that is made of rules for single nodes rewrites something in the examples that prove it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.passes import node_rules
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.pipeline import built_in
from llmc.passes.recorded_graph import recorded_copy
from llmc.passes.rewrite import GraphPass
from llmc.passes.rewrite_log import RewriteLog


def _is_of_rules(each: GraphPass) -> bool:
    module = sys.modules[each.run.__module__]
    return hasattr(module, "rule_pass") or hasattr(module, "apply_rules")


PASSES = [pass_ for pass_ in built_in() if isinstance(pass_, GraphPass) and pass_.examples and _is_of_rules(pass_)]
# Which channel is the largest has no meaning over symbols: other tests compare these with torch.
ELSEWHERE = {"normalize_lookups": ["_argmax", "_largest"], "normalize_routing": ["_mark_taken", "_top_k"]}


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_every_rule_is_met(each: GraphPass, monkeypatch: pytest.MonkeyPatch) -> None:
    known, met = set[str](), set[str]()

    def watched(rule: Rule) -> Rule:
        name = (rule.func if isinstance(rule, partial) else rule).__qualname__
        known.add(name)

        def watch(node: fx.Node) -> fx.Node | Call | None:
            replacement = rule(node)
            if replacement is not None:
                met.add(name)
            return replacement

        return watch

    def apply_watched(graph: ModelGraph, rules: Mapping[Any, Rule], log: RewriteLog) -> None:
        apply_rules(graph, {target: watched(rule) for target, rule in rules.items()}, log)

    for module in (node_rules, sys.modules[each.run.__module__]):
        monkeypatch.setattr(module, "apply_rules", apply_watched, raising=module is node_rules)
    for example in each.examples:
        graph, nodes = recorded_copy(example.graph())
        log = RewriteLog(nodes, None)
        log.begin_pass(each.name)
        each.run(graph, example.options, log)
    assert sorted(known - met) == ELSEWHERE.get(each.name, [])
