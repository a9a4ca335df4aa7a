"""Lower an optimized graph to a Program: choose kernels, build loops, place buffers, order launches.

cpp/lowering.py prints it as C++, triton/lowering.py makes GPU kernels of the same plan. In reading order: `plan_step` →
`_units` (what is launched, and when) → launches.py (one launch after the other).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from llmc.codegen.backend import Backend
from llmc.codegen.claims import find_claims
from llmc.codegen.dependencies import dependencies, is_loop_node
from llmc.codegen.fuse_groups import Group, fuse_groups
from llmc.codegen.kernel_ir import Loop
from llmc.codegen.launches import CONCATENATIONS, LaunchBuilder
from llmc.codegen.limits import engine_limits
from llmc.codegen.logit_rows import check_logit_rows
from llmc.codegen.origin import unsupported
from llmc.codegen.placement import Unit, unit_nodes
from llmc.codegen.side_views import SideViews
from llmc.codegen.stand_ins import find_stand_ins
from llmc.codegen.views import View, Views, find_views
from llmc.codegen.weight_slots import SlotRecipe
from llmc.errors import LoweringError
from llmc.graph.dtype_names import torch_name
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import BITWISE, reduces
from llmc.graph.refusal import Refusal
from llmc.graph.step_inputs import hidden_width
from llmc.options import BuildOptions
from llmc.program import CacheSlot, Program, RankLayout, StateSlot

_WRITE_AN_OP = "write it with operations that `llmc passes` and the documentation list, or build with target reference"


@dataclass(frozen=True)
class StepPlan:
    """A lowered step in no language yet.

    loops: each different loop and its name. recipes: the recipes of program.weights. refusals: the near-misses of
    claims.
    """

    program: Program
    loops: dict[Loop, str]
    recipes: tuple[SlotRecipe, ...]
    refusals: tuple[Refusal, ...]


def plan_step(graph: ModelGraph, backend: Backend, options: BuildOptions) -> StepPlan:
    """Choose the backend's kernels and place buffers. Raises LoweringError as `lower` does."""
    if not graph.hands_over:
        check_logit_rows(graph)
    claims = find_claims(graph, backend)
    views, copies = find_views(graph, claims.nodes)
    edges = dependencies(graph, views, copies)
    for node in edges:
        _check(node, copies, views, backend)
    groups = fuse_groups(graph, views, copies)
    output = _output_view(graph, views)
    sides = SideViews.of(graph, views, output, edges)
    stand_ins = find_stand_ins(graph, sides)
    edges.add_edges_from((stand_in, product) for product, stand_in in stand_ins.items())
    units = _units(edges, groups)
    limits = engine_limits(graph.info, options, rows_are_free=backend.has_free_rows)
    builder = LaunchBuilder(graph, backend, claims, views, copies, units, output, sides, stand_ins, limits)
    for unit in units:
        builder.emit(unit)
    builder.finish_logits()
    builder.finish_sides()
    buffers, plan = builder.planned_buffers()
    program = Program(
        limits=limits,
        vocab_size=graph.info.row_width if graph.hands_over else output.columns,
        arena=plan.arena,
        unplanned_arena=plan.unplanned,
        buffers=buffers,
        weights=builder.weights.slots(),
        caches=_caches(graph, backend),
        states=tuple(StateSlot(state.shape) for state in graph.states),
        launches=tuple(builder.launches),
        alternatives=builder.planned_alternatives(),
        side_outputs=tuple(builder.side_outputs),
        hidden_width=hidden_width(graph),
        layout=RankLayout(graph.ranks, graph.pipeline_stages),
        stage=graph.pipeline_stage or 0,
        hands_over=output.columns if graph.hands_over else 0,
        adapters=graph.adapters,
        policies=graph.policies,
        exact_rows=graph.exact_rows,
    )
    return StepPlan(program, builder.loops, builder.weights.recipes(), claims.refusals)


def _check(node: fx.Node, copies: frozenset[fx.Node], views: Views, backend: Backend) -> None:
    if node in copies or node.target in CONCATENATIONS:
        return
    in_loop = is_loop_node(node, copies, views)
    refusal = loop_refusal(node, backend.float_dtypes) if in_loop else backend.refusal(node)
    if refusal is not None:
        raise unsupported(refusal.node, refusal.reason, _WRITE_AN_OP)


def _units(edges: nx.DiGraph, groups: Sequence[Group]) -> tuple[Unit, ...]:
    """The launched units in an order close to the graph's: a group runs at the place of its last node."""
    index = {node: i for i, node in enumerate(edges)}
    home: dict[fx.Node, Unit] = {node: node for node in edges}
    for group in groups:
        home |= dict.fromkeys(group.nodes, group)
    order = nx.DiGraph()
    order.add_nodes_from(home.values())
    order.add_edges_from((home[a], home[b]) for a, b in edges.edges if home[a] is not home[b])
    sort = nx.lexicographical_topological_sort(order, key=lambda unit: max(index[n] for n in unit_nodes(unit)))
    return tuple(sort)


def _output_view(graph: ModelGraph, views: Views) -> View:
    result = graph.logits()
    view = views[result]
    if not isinstance(view, View) or view.value.node.op == "placeholder":
        raise unsupported(result, "the graph returns an input", "return logits")
    return view


def _caches(graph: ModelGraph, backend: Backend) -> tuple[CacheSlot, ...]:
    for cache in graph.caches:
        if cache.format is None and cache.dtype not in backend.float_dtypes:
            raise LoweringError(f"the KV cache cannot be {cache.dtype}", fix="build with kv_dtype float32 or bfloat16")
    return tuple(cache.slot() for cache in graph.caches)


_DTYPES = frozenset({torch.int32, torch.int64, torch.bool})


def loop_refusal(node: fx.Node, float_dtypes: frozenset[torch.dtype]) -> Refusal | None:
    """Return why no loop can hold the node, or None. float_dtypes: those that the loop's language stores."""
    value = node.meta["val"]
    if value.dtype not in float_dtypes | _DTYPES:
        known = ", ".join(sorted(torch_name(d) for d in float_dtypes))
        return Refusal(f"its result is {value.dtype}; loops know {known}, integers and booleans", node)
    if node.target in BITWISE and value.dtype != torch.bool:
        return Refusal(f"it works on the bits of {value.dtype}; loops know it for booleans only", node)
    if not reduces(node):
        return None
    shape = node.all_input_nodes[0].meta["val"].shape
    rank = len(shape)
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    reduced = [axes] if isinstance(axes, int) else list(axes) if isinstance(axes, Sequence) else list(range(rank))
    if [a % rank for a in reduced if isinstance(a, int)] != [rank - 1]:
        return Refusal(f"it reduces axes {reduced} of {rank}; a loop reduces only the last one", node)
    if not isinstance(shape[-1], int):
        return Refusal("it reduces over the tokens", node)
    return None
