"""Write a pass: fold the weight of each RMSNorm into the products that read it.

    linear(rms_norm(x, w, eps), W)  ->  linear(rms_norm(x, None, eps), W · w)
Must have: the norm has a weight and is read by products with weights of their own only.
Numerics: reorder, since W · w is rounded once, before the sum instead of inside it.

Two passes, one of each kind: a pattern (Rewrite) takes the weight out of the norm, a function over the graph
(GraphPass) moves it into the products. The runner numbers, verifies and times them like llmc's own; refusals, diff and
bisect work on them too.

    python examples/write_a_pass.py [MODEL]
    llmc diff MODEL --passes-from examples/write_a_pass.py:PASSES --passes split_norm_weight..fold_norm_weight
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

import llmc
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Derived
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Match, Numerics, Refusal, Rewrite, RewriteLog
from llmc.passes.recorded_graph import new_weight

aten, ops = torch.ops.aten, torch.ops.llmc


# 1. A pattern pass. Parameters are wildcards; the body is what the graph must hold.
def weighted_norm(x: Any, weight: Any, eps: Any) -> Any:
    return ops.rms_norm.default(x, weight, eps)


def norm_then_weight(x: Any, weight: Any, eps: float) -> Any:
    return aten.mul.Tensor(ops.rms_norm.default(x, None, eps), weight)


def every_reader_can_take_it(match: Match) -> Refusal | None:
    """Sees each match before it is rewritten. A Refusal leaves it alone; `llmc explain` prints why."""
    for user in match.root.users:
        if user.target is not ops.linear.default:
            return Refusal(f"{match.root.name} is also read by {user.name}", match.root, users=(user,))
        if len(user.args[1].users) > 1:
            return Refusal(f"the weight of {user.name} is used elsewhere too", user)
    return None


def has_a_weight(match: Match) -> bool:
    """Whether a match is meant at all: norms without a weight are no near-misses, they are not ours."""
    return match.bound["weight"] is not None


split_norm_weight = Rewrite(
    "split_norm_weight",
    patterns=(weighted_norm,),
    replacement=norm_then_weight,
    precondition=every_reader_can_take_it,
    applies=has_a_weight,
    numerics=Numerics.EXACT,
    after="check_canonical",  # Where it goes: the graph is canonical there.
)


# 2. A pass over the whole graph. log.step comes before each single rewrite, and every step leaves a graph that runs.
def fold(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for linear in graph.graph.find_nodes(op="call_function", target=ops.linear.default):
        scaled = linear.args[0]
        if is_scaled_norm(scaled, graph):
            log.step(f"fold {scaled.args[1].name} into {linear.name}", linear, scaled)
            fold_one(graph, linear, scaled)


def is_scaled_norm(node: fx.Node, graph: ModelGraph) -> bool:
    return (
        node.target is aten.mul.Tensor
        and node.args[0].target is ops.rms_norm.default
        and getattr(node.args[1], "name", None) in graph.weights
    )


def fold_one(graph: ModelGraph, linear: fx.Node, scaled: fx.Node) -> None:
    norm, vector = scaled.args
    matrix = linear.args[1]
    # No weight is read here: a recipe says how it is made when the engine is written.
    recipe = Derived(aten.mul.Tensor, (graph.weights[matrix.name], graph.weights[vector.name]))
    product = new_weight(graph, f"{matrix.name}_scaled", recipe, matrix.meta["val"])
    linear.replace_input_with(matrix, product)
    linear.replace_input_with(scaled, norm)


fold_norm_weight = GraphPass("fold_norm_weight", fold, Numerics.REORDER, after="split_norm_weight")

PASSES = [split_norm_weight, fold_norm_weight]


def main(model: Path) -> None:
    passes = llmc.passes.extended(*PASSES)
    with llmc.compile(model, passes=passes, check_passes=True, max_model_len=256) as engine:
        for record in engine.manifest.passes:
            if record.name in {each.name for each in PASSES}:
                print(f"{record.name}: {record.rewrites} rewrites, {record.refusals} refused")
        print(engine.generate(["KING RICHARD:"], llmc.SamplingParams(max_tokens=24))[0].text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "models" / "bard-draft")
