"""Legal nodes of a graph at each stage: aten's pointwise and shape ops, llmc:: ops by their records, and inputs.

Canonical graphs use aten.reshape, never aten.view: after the copies are removed a view need not exist.
"""

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.errors import PassError
from llmc.graph.dead_code import writes_memory
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import RECORDS, op_call, ops_at, record_of
from llmc.graph.pointwise import ELEMENTARY
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import group_inputs
from llmc.program import ADAPTERS, COMPACTION, HIDDEN, ROW_ADAPTERS, STATE_SLOTS, STEP_INPUTS

aten = torch.ops.aten

SHAPE_OPS = frozenset(
    {
        operator.getitem,
        aten.cat.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.stack.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)
_TOKENWISE = SHAPE_OPS | ELEMENTARY.keys()

# Further aten ops that are legal if the build waives the contract of this name.
_FALLBACKS: dict[str, frozenset[Any]] = {
    "linear": frozenset({aten.addmm.default, aten.bmm.default, aten.linear.default, aten.matmul.default}),
    "pointwise": frozenset({aten.cumsum.default, aten.erfc.default, aten.var.correction}),
}

# Step inputs before the caches, with their ranks.
_MODEL_INPUTS = {"input_ids": 1, "positions": 1}
_STEP_INPUTS = {name: 2 if name == "block_tables" else 1 for name in STEP_INPUTS if name != HIDDEN}
STAGE_INPUTS: dict[Stage, dict[str, int]] = {
    Stage.CAPTURED: _MODEL_INPUTS,
    Stage.CANONICAL: _MODEL_INPUTS,
    Stage.SERVING: _STEP_INPUTS,
    Stage.OPTIMIZED: _STEP_INPUTS,
}


def legal_ops(stage: Stage) -> frozenset[Any]:
    """The ops that a graph may call at a stage. Captured graphs may also call any functional aten op."""
    return _TOKENWISE | ops_at(stage)


def fallback_ops(contracts: Collection[str]) -> frozenset[Any]:
    """Return further ops that are legal if the build waives these contracts."""
    own = {overload for overload, record in RECORDS.items() if record.fallback in contracts}
    return frozenset().union(own, *(_FALLBACKS.get(name, ()) for name in contracts))


def all_fallback_ops() -> frozenset[Any]:
    """The ops that are legal in some builds."""
    return fallback_ops({*_FALLBACKS, *(r.fallback for r in RECORDS.values() if r.fallback is not None)})


def verify(graph: ModelGraph, *, also: Iterable[Stage] = (), allow_fallback: Collection[str] = ()) -> None:
    """Raise PassError at the first thing that is not legal at the graph's stage or at one of `also`.

    also: the stages around a pass that was cut half-way. allow_fallback: names of contracts that may be missed.
    """
    stages = tuple(dict.fromkeys((graph.stage, *also)))
    if Stage.LOWERED in stages:
        raise PassError("a lowered program is not a graph", at=graph.info.name)
    legal = fallback_ops(allow_fallback).union(*(legal_ops(s) for s in stages))
    graph.graph.lint()
    _check_inputs(graph, stages)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            _check_op(node, legal, Stage.CAPTURED in stages, stages)
        elif node.op not in ("placeholder", "output"):
            raise _illegal(node, f"{node.op} nodes are never legal")
        if node.op != "output" and "val" not in node.meta:
            raise _illegal(node, "it has no fake value")
    _check_output(graph, stages)


def _check_op(node: fx.Node, legal: frozenset[Any], is_captured: bool, stages: tuple[Stage, ...]) -> None:
    if node.target not in legal and not (is_captured and _is_captured(node)):
        names = " or ".join(s.value for s in stages)
        fix = "write it with torch's own operations" if is_captured else None
        raise _illegal(node, f"{node.target} is not legal at stage {names}", fix)
    record = record_of(node)
    problem = record.check(op_call(node)) if record is not None and record.check is not None else None
    if problem is not None:
        raise _illegal(node, problem)


def _is_captured(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "aten" and not writes_memory(node)
    return getattr(node.target, "__module__", None) in ("_operator", "operator", "torch", "math")


def _check_inputs(graph: ModelGraph, stages: tuple[Stage, ...]) -> None:
    seen = [n.name for n in graph.inputs()]
    pools = () if graph.adapters is None else (ADAPTERS, ROW_ADAPTERS, *graph.adapters.names())
    expected: list[list[str]] = []
    for stage in stages:
        caches = [f"kv_cache_{i}_{part}" for i in range(len(graph.caches)) for part in "kv"]
        is_paged = stage in (Stage.SERVING, Stage.OPTIMIZED)
        hidden = [HIDDEN] if HIDDEN in seen else []
        first, second, *others = STAGE_INPUTS[stage]
        compaction = [COMPACTION] if COMPACTION in seen else []
        states = [STATE_SLOTS, *(f"state_{i}" for i in range(len(graph.states)))] if STATE_SLOTS in seen else []
        paged = [*group_inputs(graph), *caches, *compaction, *states] if is_paged else []
        expected.append([first, second, *hidden, *others, *paged, *pools])
    in_order = any(seen == names for names in expected)
    # A pass that is cut while it adds inputs leaves some of the later stage's.
    if not in_order and not (len(stages) > 1 and any(set(seen) <= set(names) for names in expected)):
        wanted = " or ".join(str(names) for names in expected)
        raise PassError(f"the step inputs are {seen}, expected {wanted}", at=graph.info.name)
    for node in graph.inputs():
        value = node.meta.get("val")
        if node.name in pools:
            continue
        ranks = {_rank(graph, node.name, stage) for stage in stages}
        if Stage.CAPTURED in stages:
            ranks.add(3 if node.name == HIDDEN else 2)
        if not isinstance(value, torch.Tensor) or value.dim() not in ranks:
            raise PassError(f"input {node.name} is {describe(value)}, expected rank {sorted(ranks)}", at=node.name)
    missing = sorted(set(graph.weights) - {n.name for n in graph.weight_nodes()})
    if missing:
        raise PassError(f"weights that have no placeholder: {missing}", at=graph.info.name)


def _rank(graph: ModelGraph, name: str, stage: Stage) -> int:
    """The rank of a step input."""
    states = {f"state_{spec.index}": 1 + len(spec.shape) for spec in graph.states}
    own = {HIDDEN: 2, STATE_SLOTS: 1, COMPACTION: 1, **states}
    return own.get(name, STAGE_INPUTS[stage].get(group_inputs(graph).get(name, name), 4))


def _check_output(graph: ModelGraph, stages: tuple[Stage, ...]) -> None:
    returned = graph.graph.output_node().args[0]
    value = graph.logits().meta["val"] if isinstance(returned, fx.Node) or graph.side_outputs else returned
    if not isinstance(value, torch.Tensor) or value.shape[-1] != graph.info.row_width:
        wanted = "logits over {} tokens" if graph.info.head is None else "{} numbers a text"
        raise PassError(f"the graph returns {describe(value)}, not {wanted.format(graph.info.row_width)}")
    if graph.side_outputs:
        _check_sides(graph, has_batch=Stage.CAPTURED in stages)
    if Stage.CAPTURED not in stages and (value.dim() != 2 or value.dtype is not torch.float32):
        raise PassError(f"the graph returns {describe(value)}, expected float32 logits [rows, vocabulary]")


def _check_sides(graph: ModelGraph, *, has_batch: bool) -> None:
    names, count = graph.side_outputs, len(graph.returned()) - 1
    if count != len(names) or len(set(names)) < len(names):
        raise PassError(f"the graph returns {count} tensors after its logits and calls them {', '.join(names)}")
    for name, node in graph.sides().items():
        value = node.meta["val"]
        first = 2 if has_batch and isinstance(value, torch.Tensor) and value.dim() == 3 else 1
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape[first:]):
            raise _illegal(node, f"the side output {name} is {describe(value)}, expected a row per token or logit row")


def _illegal(node: fx.Node, problem: str, fix: str | None = None) -> PassError:
    return PassError(f"node {node.name}: {problem}", at=source_line(node) or node.format_node(), fix=fix)
