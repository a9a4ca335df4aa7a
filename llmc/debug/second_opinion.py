"""What onnxruntime says of each stage of a model's pipeline, or of each cut: the graph there against the graph here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmc.debug.bisect import Outcome, Pipeline, cut_graph
from llmc.debug.difference import Difference, difference
from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.debug.onnx_oracle import OnnxOracle
from llmc.errors import LlmcError
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.stage import Stage
from llmc.graph.weights import WeightSource
from llmc.passes.runner import run_pipeline

# Of fp32 against fp32, over the logits' spread.
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class StageOpinion:
    """nodes: calls in the graph. difference: of onnxruntime's logits from those of the graph run eagerly."""

    stage: Stage
    nodes: int
    difference: Difference


def stage_opinions(pipeline: Pipeline, tokens: Sequence[int]) -> Iterator[StageOpinion]:
    """Of each stage that the pipeline reaches, the graph after its last pass. Raises LoweringError for what standard
    ops cannot say."""
    captured = pipeline.captured
    graphs = {Stage.CAPTURED: captured.graph}

    def keep(record: PassRecord, graph: ModelGraph) -> None:
        if graph.stage is not Stage.CAPTURED:
            graphs[graph.stage] = graph.copy()

    run_pipeline(captured.graph, pipeline.passes, pipeline.options, keep, pipeline.data)
    for stage, graph in graphs.items():
        nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
        yield StageOpinion(stage, nodes, opinion(graph, captured.source, tokens, pipeline.options.block_size))


def opinion(graph: ModelGraph, source: WeightSource, tokens: Sequence[int], block_size: int) -> Difference:
    """Of onnxruntime's logits from the graph's own, over the same steps."""
    steps = default_chunks(len(tokens)) if graph.caches else (len(tokens),)
    here = run_tokens(graph, source, tokens, chunk_sizes=steps, block_size=block_size)
    return difference(OnnxOracle(graph, source).logits(tokens, chunk_sizes=steps, block_size=block_size), here)


@dataclass(frozen=True)
class OpinionCheck:
    """Of a bisection: onnxruntime computes what the cut graph does, within `tolerance` of its spread."""

    pipeline: Pipeline
    runner: MemoRun
    tolerance: float

    def __call__(self, number: int) -> Outcome:
        """Run the graph after that many rewrites, here and there. What cannot be exported fails."""
        source, block_size = self.pipeline.captured.source, self.pipeline.options.block_size
        try:
            found = opinion(cut_graph(self.pipeline, number), source, self.runner.tokens, block_size)
        except LlmcError as error:
            return Outcome(False, error.problem)
        figures = f"onnxruntime differs by {found.relative:.1e}, top-1 {found.top1:.1%}"
        return Outcome(found.within(self.tolerance), figures)
