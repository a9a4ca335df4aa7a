"""The pipeline stages of an engine while it is built: a program and its code for each, the first one's in the root."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from llmc.api.build_stages import Stages
from llmc.codegen.target_kind import Builder, LoweredEngine, TargetKind
from llmc.codegen.weight_slots import SlotRecipe
from llmc.engine_format.engine_kinds import PROGRAM_NAME
from llmc.engine_format.reader import stage_folder
from llmc.engine_format.writer import EngineWriter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stages import stage_graphs
from llmc.options import BuildOptions
from llmc.program import Program
from llmc.program.program_json import program_to_json


@dataclass(frozen=True)
class StageBuild:
    """One stage. recipes: the recipes of its program's weights."""

    program: Program
    recipes: Sequence[SlotRecipe]
    builder: Builder
    writer: EngineWriter


@contextmanager
def stage_builds(
    graph: ModelGraph, kind: TargetKind, options: BuildOptions, first: Builder, writer: EngineWriter, stages: Stages
) -> Iterator[list[StageBuild]]:
    """Lower each stage, write its program and begin to compile it; one for a graph that is not cut, or whose kind of
    target runs it in one process. first: the builder that was started with the build. Raises LoweringError."""
    with ExitStack() as started:
        lowered: list[tuple[LoweredEngine, Builder, EngineWriter]] = []
        with stages("lower"):
            for number, stage_graph in enumerate(stage_graphs(graph) if kind.has_stages else (graph,)):
                builder = started.enter_context(kind.builder(options)) if number else first
                place = writer.below(stage_folder(number)) if number else writer
                lowered.append((builder.lower(stage_graph), builder, place))
        builds = []
        for engine, builder, place in lowered:
            program = builder.compile(place, stages)
            place.write_text(PROGRAM_NAME, program_to_json(program))
            builds.append(StageBuild(program, engine.recipes, builder, place))
        yield builds
