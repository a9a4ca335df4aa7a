"""Lower a graph for a CPU: the plan of a step, printed as C++."""

from dataclasses import dataclass

from llmc.codegen.cpp.backend import CppBackend
from llmc.codegen.cpp.step import print_source
from llmc.codegen.lowering import plan_step
from llmc.codegen.weight_slots import SlotRecipe
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.program import Program
from llmc.targets import CpuTarget


@dataclass(frozen=True)
class Lowered:
    """The parts of the engine. recipes: how to make each of program.weights, before packing."""

    program: Program
    source: str
    recipes: tuple[SlotRecipe, ...]


def lower(graph: ModelGraph, target: CpuTarget, options: BuildOptions) -> Lowered:
    """Lower a graph of stage optimized (serving works too). Raises LoweringError naming an op that has no kernel."""
    plan = plan_step(graph, CppBackend(target), options)
    return Lowered(plan.program, print_source(plan.program, plan.loops, graph.info.name), plan.recipes)
