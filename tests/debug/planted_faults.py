"""Wrong passes: each spoils one place of a llama, as a mistake in a pass would."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Match, Numerics, Pass, Rewrite, RewriteLog

aten, ops = torch.ops.aten, torch.ops.llmc

_WRONG_EPSILON = 0.05


def _norm(x: Any, weight: Any, eps: Any) -> Any:
    return ops.rms_norm.default(x, weight, eps)


def _norm_with_wrong_epsilon(x: Any, weight: Any, eps: float) -> Any:
    return ops.rms_norm.default(x, weight, _WRONG_EPSILON)


def _is_in_layer_1(match: Match) -> bool:
    return "layers_1_input" in match.bound["weight"].name and match.bound["eps"] != _WRONG_EPSILON


wrong_epsilon = Rewrite(
    "wrong_epsilon", (_norm,), _norm_with_wrong_epsilon, applies=_is_in_layer_1, after="check_canonical"
)


def _rope(x: Any, cos: Any, sin: Any, interleaved: Any) -> Any:
    return ops.rope.default(x, cos, sin, interleaved)


def _rope_of_swapped_halves(x: fx.Proxy, cos: Any, sin: Any, interleaved: bool) -> Any:
    half = x.node.meta["val"].shape[-1] // 2
    first, second = aten.slice.Tensor(x, 2, 0, half), aten.slice.Tensor(x, 2, half, 2 * half)
    return ops.rope.default(aten.cat.default([second, first], -1), cos, sin, interleaved)


def _is_second_key(match: Match) -> bool:
    return match.root.name == "rope_3"


swapped_halves = Rewrite(
    "swapped_halves", (_rope,), _rope_of_swapped_halves, applies=_is_second_key, after="check_canonical"
)


def _shift(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    first, second = graph.graph.find_nodes(op="call_function", target=ops.kv_write.default)
    for write in (first, second):
        # Only the second is wrong: the first rewrite of the pass is innocent.
        offset = 1 if write is second else 0
        log.step(f"write the slots of {write.name} plus {offset}", write)
        with graph.graph.inserting_before(write):
            slots = graph.graph.call_function(aten.add.Tensor, (write.args[4], offset))
            graph.graph.call_function(ops.kv_write.default, (*write.args[:4], slots))
        graph.graph.erase_node(write)


slot_off_by_one = GraphPass("slot_off_by_one", _shift, Numerics.EXACT, after="page_kv_cache")


def _stop(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for count, node in enumerate(graph.graph.find_nodes(op="call_function", target=ops.linear.default)):
        log.step(f"look at {node.name}", node)
        if count == 5:
            raise KeyError("a mistake in the pass")


crash = GraphPass("crash", _stop, Numerics.EXACT, after="check_canonical")

# By pass: the node that its wrong rewrite is about, as it was called before.
FAULTS: Mapping[str, tuple[Pass, str]] = MappingProxyType(
    {
        "wrong_epsilon": (wrong_epsilon, "rms_norm_2"),
        "swapped_halves": (swapped_halves, "rope_3"),
        "slot_off_by_one": (slot_off_by_one, "kv_write_1"),
    }
)
