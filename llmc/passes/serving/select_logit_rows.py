"""Compute logits, and values that are used only for them, only for the requested rows.

    logits[T, V]                            ->  select_rows(logits, logit_rows)[L, V]
    select_rows(op(x[T, C], y[T, C], w))    ->  op(select_rows(x), select_rows(y), w)
The first rewrite selects at the very end, in a draft's graph its hidden states as well; each further one moves the
selection above one op, up to the last attention: the last layer, except its attention and QKV, then runs for L rows
only. Must have: the op works row by row; its only user is the selection (a tensor that others read is selected once and
stays); operands that are not floating-point, such as masks, can be computed from selected rows too, since kernels
select no others. Logits must have one row per token, or the build fails, unless allow_fallback names logit_rows.
Numerics: reorder, since a library matrix product of fewer rows may sum in another order; the kernels here do not.
"""

from operator import getitem

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import record_of
from llmc.graph.refusal import Refusal
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import step_input
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size
from llmc.program import HIDDEN

CONTRACT = "logit_rows"
_SELECT = torch.ops.llmc.select_rows.default
# Row by row when they work on the last axis.
_ALONG_AN_AXIS = frozenset(
    {
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.split_with_sizes.default,
        torch.ops.aten.mean.dim,
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.amax.default,
    }
)
# The views that join attention's heads.
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten.reshape.default})


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Select at the output, then move the selection up one op at a time until nothing moves."""
    if not _select_at_the_end(graph, options, log):
        return
    moved = True
    while moved:
        selections = {n.args[0]: n for n in graph.graph.find_nodes(op="call_function", target=_SELECT)}
        # The latest producer first: an earlier one may have a user that is yet to move below the selection.
        moved = any(_move_above(graph, producer, selections, log) for producer in sorted(selections, reverse=True))


select_logit_rows = GraphPass(
    "select_logit_rows", run, Numerics.REORDER, Stage.SERVING, unproved="its result has only the requested rows"
)


def _select_at_the_end(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> bool:
    """Whether the output is of the rows asked for, now or already."""
    output = graph.graph.output_node()
    logits = graph.logits()
    value: Tensor = logits.meta["val"]
    rows = _logit_rows(graph)
    if value.ndim == 2 and same_size(value.shape[0], rows.meta["val"].shape[0]):
        return True
    if not _has_rows(graph, logits):
        refusal = Refusal(f"the logits are {render_type(logits)}, not one row per token", logits)
        log.refuse(refusal)
        if CONTRACT not in options.allow_fallback:
            raise PassError(
                f"logits cannot be limited to the rows asked for: {refusal.reason}",
                at=logits.name,
                fix=f"return logits [1, tokens, vocabulary], or build with allow_fallback=('{CONTRACT}',)",
            )
        return False
    for node in dict.fromkeys((logits, *_of_wanted_rows(graph))):
        log.step(f"select rows of {node.name}", node)
        with graph.graph.inserting_before(output):
            selected = graph.graph.call_function(_SELECT, (node, rows))
        output.replace_input_with(node, selected)
    return True


def _of_wanted_rows(graph: ModelGraph) -> tuple[fx.Node, ...]:
    """The side outputs that a drafter continues from. Only another drafter continues from rows without logits."""
    is_last = step_input(graph, HIDDEN) is not None and graph.draft is None
    sides = graph.sides() if is_last else {}
    return tuple(node for name, node in sides.items() if name == HIDDEN)


def _logit_rows(graph: ModelGraph) -> fx.Node:
    rows = step_input(graph, "logit_rows")
    if rows is None:
        raise PassError(
            "the graph has no input logit_rows", at=graph.info.name, fix="run page_kv_cache before this pass"
        )
    return rows


def _move_above(graph: ModelGraph, producer: fx.Node, selections: dict[fx.Node, fx.Node], log: RewriteLog) -> bool:
    """Move the selection of one producer's result above it, if that is allowed."""
    op = producer.all_input_nodes[0] if producer.target is getitem else producer
    if op.op != "call_function" or _is_end(op):
        return False
    results = (op,) if op is producer else tuple(result for result in op.users if result.users)
    refusal = _refusal(graph, op) or _other_user(results, selections)
    if refusal is not None:
        log.refuse(refusal)
        return False
    log.step(f"select rows before {op.name}", op)
    rows = _logit_rows(graph)
    chosen = {x: _selected(graph, x, rows, selections) for x in op.all_input_nodes if _has_rows(graph, x)}
    with graph.graph.inserting_before(op):
        args, kwargs = fx.map_arg((op.args, op.kwargs), lambda n: chosen.get(n, n))
        narrow = graph.graph.create_node("call_function", op.target, args, kwargs)
        for result in results:
            selected = narrow if result is op else graph.graph.call_function(getitem, (narrow, result.args[1]))
            selections[result].replace_all_uses_with(selected)
            graph.graph.erase_node(selections[result])
    for dead in dict.fromkeys((*op.users, op)):
        graph.graph.erase_node(dead)
    return True


def _selected(graph: ModelGraph, x: fx.Node, rows: fx.Node, selections: dict[fx.Node, fx.Node]) -> fx.Node:
    """The selection of x, placed right after x so that all its readers share it."""
    if x not in selections:
        place = graph.graph.find_nodes(op="placeholder")[-1] if x.op == "placeholder" else x
        with graph.graph.inserting_after(place):
            selections[x] = graph.graph.call_function(_SELECT, (x, rows))
    return selections[x]


def _has_rows(graph: ModelGraph, node: fx.Node) -> bool:
    """Whether a tensor is a matrix with one row per token."""
    value, tokens = node.meta["val"], graph.inputs()[0].meta["val"].shape[0]
    return isinstance(value, Tensor) and value.ndim == 2 and same_size(value.shape[0], tokens)


def _refusal(graph: ModelGraph, node: fx.Node) -> Refusal | None:
    """Return why an op may not keep rows apart."""
    if node.target in _ALONG_AN_AXIS:
        dim = call_arguments(node)["dim"]
        if any(axis not in (1, -1) for axis in (dim if isinstance(dim, list | tuple) else (dim,))):
            return Refusal(f"{node.target} works on axis {dim}, not on the last of 2", node)
    elif not _keeps_rows(node):
        return Refusal(f"{node.target} is not known to keep rows apart", node)
    for operand in node.all_input_nodes:
        value: object = operand.meta["val"]
        if _has_rows(graph, operand):
            if (refusal := _unselectable(graph, operand, node)) is not None:
                return refusal
        elif not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            return Refusal(
                f"operand {operand.name} is {render_type(operand)}, not a matrix with one row per token", node
            )
    return None


def _unselectable(graph: ModelGraph, operand: fx.Node, reader: fx.Node) -> Refusal | None:
    """Return why rows of an operand can be selected neither after it nor, step by step, before the node that makes
    it."""
    if operand.meta["val"].is_floating_point():
        return None
    op = operand.all_input_nodes[0] if operand.target is getitem else operand
    results = (op,) if op is operand else tuple(op.users)
    stays = op.op != "call_function" or _is_end(op) or any(set(r.users) != {reader} for r in results)
    if not stays and _refusal(graph, op) is None:
        return None
    reason = f"operand {operand.name} is {render_type(operand)}, whose rows cannot be selected"
    return Refusal(reason, reader)


def _is_end(node: fx.Node) -> bool:
    """Whether the selection ends there: at nodes that mix tokens or make rows, and right after attention."""
    record = record_of(node)
    return node.target in _VIEWS or (record is not None and not record.rows)


def _keeps_rows(node: fx.Node) -> bool:
    record = record_of(node)
    if record is not None:
        return bool(record.rows)
    is_cast = node.target is torch.ops.aten._to_copy.default  # Which torch does not tag.
    return is_cast or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags)


def _other_user(results: tuple[fx.Node, ...], selections: dict[fx.Node, fx.Node]) -> Refusal | None:
    for result in results:
        others = [u.name for u in result.users if u is not selections.get(result)]
        if others:
            return Refusal(f"all rows of {result.name} are needed: it is used by {', '.join(others)}", result)
    return None
