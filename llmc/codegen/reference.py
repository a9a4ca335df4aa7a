"""The engine of the reference executor: the graph itself as text, and weights as in the checkpoint.

An engine for the reference target holds nothing else. One for GPUs carries its graph too, so that it can be run where
there is none: its weights are in the layouts of GPU kernels, from which they can be restored.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from llmc.codegen.limits import engine_limits
from llmc.codegen.logit_rows import check_logit_rows
from llmc.codegen.origin import unsupported
from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe, recipe_key
from llmc.errors import LoweringError
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.serialize import WeightOf, serialize_graph
from llmc.graph.step_inputs import hidden_width, is_of_logit_rows
from llmc.graph.weights import Recipe
from llmc.options import BuildOptions
from llmc.program import Affine, Layout, Program, RankLayout, RowCount, SideOutput, StateSlot, WeightSlot
from llmc.program.program_interface import memory_text


@dataclass(frozen=True)
class ReferenceEngine:
    """An engine for the reference before it is written. program: the program, without launches. graph_text: the text of
    graph.json. recipes: the recipes of program.weights, in order."""

    program: Program
    graph_text: str
    recipes: tuple[Recipe, ...]


def lower_reference(graph: ModelGraph, options: BuildOptions) -> ReferenceEngine:
    """Take a serving or optimized graph as it is. Raises LoweringError for an op that the text cannot hold."""
    check_logit_rows(graph)
    slots: list[WeightSlot] = []
    for node in graph.weight_nodes():
        value = node.meta["val"]
        if value.dtype not in DTYPE_NAMES:
            raise unsupported(node, f"a weight is {value.dtype}", "store it as a type that safetensors knows")
        shape = tuple(int(size) for size in value.shape)
        nbytes = value.dtype.itemsize * int(value.numel())
        slots.append(WeightSlot(node.name, DTYPE_NAMES[value.dtype], shape, Layout.ROWS, nbytes))
    program = graph_program(graph, options, tuple(slots))
    text = serialize_graph(graph, memory=memory_text(program))
    return ReferenceEngine(program, text, tuple(graph.weights[slot.name] for slot in slots))


def graph_program(graph: ModelGraph, options: BuildOptions, weights: tuple[WeightSlot, ...]) -> Program:
    """The program of an engine that runs its graph: without launches."""
    return Program(
        limits=engine_limits(graph.info, options, rows_are_free=True),
        vocab_size=graph.info.row_width,
        arena=Affine(),
        unplanned_arena=Affine(),
        buffers=(),
        weights=weights,
        caches=tuple(cache.slot() for cache in graph.caches),
        states=tuple(StateSlot(state.shape) for state in graph.states),
        side_outputs=tuple(_side_output(graph, name, node) for name, node in graph.sides().items()),
        hidden_width=hidden_width(graph),
        layout=RankLayout(tensor=graph.ranks),
        policies=graph.policies,
        exact_rows=graph.exact_rows,
    )


def _side_output(graph: ModelGraph, name: str, node: fx.Node) -> SideOutput:
    value: Tensor = node.meta["val"]
    rows = RowCount.LOGIT_ROWS if is_of_logit_rows(graph, node) else RowCount.TOKENS
    return SideOutput(name, DTYPE_NAMES[value.dtype], rows, tuple(map(int, value.shape[1:])), None)


def carried_graph(graph: ModelGraph, program: Program, recipes: Sequence[SlotRecipe]) -> str | None:
    """The text of graph.json in an engine of that program, whose weights are made of `recipes`.

    None if the text cannot hold the graph, or a weight that it reads is not stored: it runs on its GPU only.
    """
    stored: dict[Hashable, WeightOf] = {}
    for slot, recipe in zip(program.weights, recipes, strict=True):
        if isinstance(recipe, CodesRecipe):
            for part, made_of in recipe.parts.items():
                stored[recipe_key(made_of)] = WeightOf(slot.name, slot.dtype, recipe.format, part)
        elif slot.layout is not Layout.MASK_STARTS:  # Made from the same masks as the graph's inputs.
            stored[recipe_key(recipe)] = WeightOf(slot.name, slot.dtype)
    weights: dict[str, WeightOf] = {}
    for node in graph.weight_nodes():
        entry, dtype = stored.get(recipe_key(graph.weights[node.name])), DTYPE_NAMES.get(node.meta["val"].dtype)
        if entry is None or dtype is None:
            return None
        weights[node.name] = replace(entry, dtype=dtype)
    try:
        return serialize_graph(graph, weights, memory_text(program))
    except LoweringError:
        return None
