"""Lower an optimized graph for GPUs: the plan of lowering.py with specialized Triton kernels, and their sources."""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from llmc.codegen.kernel_ir import Loop
from llmc.codegen.lowering import plan_step
from llmc.codegen.origin import describe, one_line
from llmc.codegen.reference import carried_graph
from llmc.codegen.triton.backend import TritonBackend
from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.printer import print_loop, print_module
from llmc.codegen.triton.specialize import specialize
from llmc.codegen.triton.token_choice import add_token_choice
from llmc.codegen.triton.turning_decode import turn_in_decodes
from llmc.engine_format.reader import stage_folder
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.program import LIBRARY, Origin, Program
from llmc.targets import GpuTarget

LOOPS_SOURCE = "kernels/loops.py"
_KERNELS = "llmc.codegen.triton.kernels"


def lower_device(graph: ModelGraph, target: GpuTarget, options: BuildOptions) -> DeviceLowered:
    """Lower a graph of stage optimized (serving works too) for a GPU, or for each of several.

    Raises LoweringError naming an op that has no kernel.
    """
    folder = stage_folder(graph.pipeline_stage) if graph.pipeline_stage else ""
    by_target = {member.name: _lower(graph, member, options, folder) for member in target.compiled}
    first, *rest = by_target.values()
    sources = dict(first.sources)
    for other in rest:
        assert other.program.weights == first.program.weights, "targets share the engine's weights"
        assert all(sources.get(file, text) == text for file, text in other.sources.items()), "and its sources"
        sources |= other.sources
    programs = {name: lowered.program for name, lowered in by_target.items()}
    # The executor of graphs runs one graph, and a stage has only a part of it.
    text = carried_graph(graph, first.program, first.recipes) if graph.pipeline_stages == 1 else None
    return DeviceLowered(programs, sources, first.recipes, first.refusals, text, folder)


def _lower(graph: ModelGraph, target: GpuTarget, options: BuildOptions, folder: str) -> DeviceLowered:
    """Lower the graph for one GPU. folder: the stage's folder in the engine."""
    backend = TritonBackend(target)
    plan = plan_step(graph, backend, options)
    planned = turn_in_decodes(plan.program, backend)
    # Only the last stage has logits to choose from.
    planned = planned if graph.hands_over else add_token_choice(planned, backend, target)
    modules = {kernel.module for kernel in backend.kernels.values() if kernel.module not in (None, LIBRARY)}
    files = {m: f"{folder}kernels/{m.rpartition('.')[2]}.py" for m in sorted(modules | _imported(modules))}
    assert len(set(files.values())) == len(files), "two kernel modules would share a file name in the engine"
    program = specialize(planned, backend.kernels, files, folder + LOOPS_SOURCE)
    sources = {file: inspect.getsource(importlib.import_module(module)) for module, file in files.items()}
    if plan.loops:
        sources[folder + LOOPS_SOURCE] = _print_loops(plan.program, plan.loops, graph.info.name)
    return DeviceLowered({target.name: program}, sources, plan.recipes, plan.refusals)


def _print_loops(program: Program, loops: Mapping[Loop, str], model: str) -> str:
    first_use: dict[str, Origin] = {}
    for launch in program.launches:
        first_use.setdefault(launch.kernel, launch.origin)
    printed = [print_loop(name, loop, describe(first_use[name])) for loop, name in loops.items()]
    return print_module(one_line(model), printed)


def _imported(modules: Iterable[str]) -> set[str]:
    """The modules of device functions that those modules' kernels call: the reader of an engine needs them too."""
    seen: set[str] = set()
    pending = list(modules)
    while pending:
        for value in vars(importlib.import_module(pending.pop())).values():
            module = _device_module(value)
            if module is not None and module not in seen:
                seen.add(module)
                pending.append(module)
    return seen


def _device_module(value: Any) -> str | None:
    module = getattr(getattr(value, "fn", None), "__module__", None)
    return module if isinstance(module, str) and module.startswith(_KERNELS) else None
