"""What the passes do to a model, from a run of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmc.codegen.sketch import sketch
from llmc.debug.coverage_observer import CoverageObserver
from llmc.debug.dump import dumped
from llmc.debug.explain import Explanation, RankExplanation
from llmc.debug.hf_plan import hf_plan
from llmc.debug.placement_record import rank_bytes
from llmc.debug.placements import PlacementObserver
from llmc.errors import LlmcError
from llmc.graph.capture import Captured
from llmc.graph.pass_record import PassRecord
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in, essential
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline


def explain_model(
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    progress: Callable[[str], None] = lambda doing: None,
) -> Explanation:
    """Run the passes on a captured model and watch. A pass that fails ends it, and is the explanation's error.

    progress: told what passes that take long are doing.
    """
    records: list[PassRecord] = []
    observer = CoverageObserver({p.name for p in built_in()}, options)
    data = ModelData(captured.source, captured.tokenizer, lambda what, done, of: progress(f"{what} {done}/{of}"))

    placed = PlacementObserver()
    observe = dumped(captured.graph, lambda record, after: records.append(record), observer, placed)
    error: LlmcError | None = None
    ranks: RankExplanation | None = None
    try:
        result = run_pipeline(captured.graph, passes, options, observe, data, essential=essential())
        if placed.placements is not None:
            memory = rank_bytes(sketch(result.graph, options))
            ranks = RankExplanation(placed.placements, memory, hf_plan(captured.graph.info.family))
    except LlmcError as caught:
        error = caught
    return Explanation(tuple(records), observer.coverage(), error, ranks)
