"""Explain a model by running the pipeline on it."""

from collections.abc import Callable, Sequence

from llmc.codegen.sketch import sketch
from llmc.debug.dump import dumped
from llmc.errors import LlmcError
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.frontends.captured import Captured
from llmc.graph.pass_record import PassRecord
from llmc.graph.stages import stage_graphs
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData, in_one_line
from llmc.passes.pipeline import built_in, essential
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline
from llmc.report.coverage.observer import CoverageObserver
from llmc.report.explanation import Explanation, RankExplanation
from llmc.report.placements.hf_plan import hf_plan
from llmc.report.placements.placements import PlacementObserver
from llmc.report.placements.record import Placements, stage_ranks


def explain_model(
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    progress: Callable[[str], None] = lambda doing: None,
    tokens: TokenDefault = DEFAULT_TOKENS,
) -> Explanation:
    """Run the passes on a captured model, and return their rewrites, refusals, coverage and placements.

    Args:
        captured: The model at stage captured.
        passes: The passes, in order.
        options: The options of the build.
        progress: Called with a phrase when a slow pass begins a part of its work.
        tokens: The target's default rounding of tokens.

    Returns:
        The explanation. If a pass fails, it ends there, and its `error` is the pass's.
    """
    records: list[PassRecord] = []
    observer = CoverageObserver({p.name for p in built_in()}, options)
    data = ModelData(captured.source, captured.tokenizer, in_one_line(progress), tokens)

    placed = PlacementObserver(options.pipeline_parallel_size)
    observe = dumped(captured.graph, lambda record, after: records.append(record), observer, placed)
    error: LlmcError | None = None
    ranks: RankExplanation | None = None
    try:
        result = run_pipeline(captured.graph, passes, options, observe, data, essential=essential())
        if options.tensor_parallel_size > 1 or options.pipeline_parallel_size > 1:
            stages = stage_ranks([sketch(graph, options) for graph in stage_graphs(result.graph)])
            plan = hf_plan(captured.graph.info.family)
            ranks = RankExplanation(placed.placements or Placements(), stages, plan)
    except LlmcError as caught:
        error = caught
    return Explanation(tuple(records), observer.coverage(), error, ranks)
