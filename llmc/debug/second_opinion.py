"""A second opinion by onnxruntime on each stage of a model's pipeline, or on each cut, compared with llmc's own
logits."""

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

# The tolerance for fp32 against fp32, relative to the logits' spread.
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class StageOpinion:
    """The logits of a stage's graph in onnxruntime, compared. nodes: calls in the graph. difference: the difference of
    onnxruntime's logits from those of the graph run eagerly."""

    stage: Stage
    nodes: int
    difference: Difference


def stage_opinions(pipeline: Pipeline, tokens: Sequence[int]) -> Iterator[StageOpinion]:
    """Yield an opinion on the graph after the last pass of each stage. Raises LoweringError for ops that standard ONNX
    ops cannot express."""
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
    """The difference between onnxruntime's logits and the graph's own, over the same steps."""
    steps = default_chunks(len(tokens)) if graph.caches else (len(tokens),)
    ours = run_tokens(graph, source, tokens, chunk_sizes=steps, block_size=block_size)
    return difference(OnnxOracle(graph, source).logits(tokens, chunk_sizes=steps, block_size=block_size), ours)


@dataclass(frozen=True)
class OpinionCheck:
    """A check for bisections: onnxruntime agrees with the cut graph to within `tolerance` of the logits' spread."""

    pipeline: Pipeline
    runner: MemoRun
    tolerance: float

    def __call__(self, number: int) -> Outcome:
        """Run the graph after that many rewrites in llmc and in onnxruntime. A graph that cannot be exported fails."""
        source, block_size = self.pipeline.captured.source, self.pipeline.options.block_size
        try:
            change = opinion(cut_graph(self.pipeline, number), source, self.runner.tokens, block_size)
        except LlmcError as error:
            return Outcome(False, error.problem)
        figures = f"onnxruntime differs by {change.relative:.1e}, top-1 {change.top1:.1%}"
        return Outcome(change.within(self.tolerance), figures)
