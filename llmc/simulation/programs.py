"""The programs of a model for different layouts of ranks: what does not depend on the layout is done once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.codegen.sketch import sketch
from llmc.codegen.target_kind import kind_of
from llmc.errors import PassError
from llmc.frontends.captured import Captured
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData, in_one_line
from llmc.passes.pipeline import parallel
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline
from llmc.program import Launch, Program, RankLayout
from llmc.program.joined_program import HAND_OVER
from llmc.targets import Target, cpu_target_here


@dataclass(frozen=True)
class ModelPrograms:
    """The programs of a model for each division. before: the model up to the passes that cut it. after: these passes
    and those that follow. options: the options of the build."""

    before: ModelGraph
    after: tuple[Pass, ...]
    options: BuildOptions
    target: Target
    data: ModelData

    def program(self, layout: RankLayout) -> Program:
        """The program of a layout, with its stages in order, and with kernels if they are to be measured. Raises
        PassError if the model cannot be split in this way."""
        cpu = cpu_target_here(self.target.name)
        if cpu is not None and layout.pipeline > 1:
            raise PassError("stages are not simulated with rates that are measured here", at=self.target.name)
        sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
        options = self.options.model_copy(update=sizes)
        graph = run_pipeline(self.before, self.after, options, data=self.data).graph
        if cpu is None:
            return sketch(graph, options)
        from llmc.codegen.cpp.lowering import lower

        return lower(graph, cpu, options).program


def model_programs(
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    target: Target,
    progress: Callable[[str], None] = lambda doing: None,
) -> ModelPrograms:
    """Run the passes up to those that cut the model. progress: told what those that take long are doing."""
    data = ModelData(
        captured.source,
        captured.tokenizer,
        in_one_line(progress),
        kind_of(target).tokens,
    )
    kept = [pass_ for pass_ in passes if pass_.name not in options.disable_passes]
    options = options.model_copy(update={"disable_passes": ()})
    names = {pass_.name for pass_ in parallel()}
    first = next((index for index, pass_ in enumerate(kept) if pass_.name in names), len(kept))
    alone = options.model_copy(update={"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    before = run_pipeline(captured.graph, kept[:first], alone, data=data).graph
    return ModelPrograms(before, tuple(kept[first:]), options, target, data)


def stages_of(program: Program) -> tuple[tuple[Launch, ...], ...]:
    """The launches of each stage; those that hand over belong to the one before."""
    stages: list[list[Launch]] = [[]]
    for launch in program.launches:
        stages[-1].append(launch)
        if launch.family == HAND_OVER:
            stages.append([])
    return tuple(map(tuple, stages))
