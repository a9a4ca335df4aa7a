"""The record of a build's passes: the files of an engine's report/ folder, and the contents of its page."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmc.engine_format import Manifest
from llmc.engine_format.reader import (
    COVERAGE_NAME,
    EXPLANATION_NAME,
    NODES_NAME,
    PASSES_NAME,
    PLACEMENTS_NAME,
    PRUNING_NAME,
    QUANTIZATION_NAME,
    SPARSITY_NAME,
)
from llmc.engine_format.writer import EngineWriter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.options import BuildOptions
from llmc.program import Program
from llmc.program.joined_program import joined_program
from llmc.report.contents import EngineContents, read_code
from llmc.report.coverage.coverage import Coverage
from llmc.report.coverage.observer import CoverageObserver
from llmc.report.explanation import Explanation
from llmc.report.explanation_text import overview_lines
from llmc.report.graph_record import GraphRecord
from llmc.report.placements.placements import PlacementObserver
from llmc.report.placements.record import Placements


@dataclass(frozen=True)
class BuildRecord:
    """The record of one run of the passes. graphs: the graph after each pass that changed something."""

    passes: tuple[PassRecord, ...]
    coverage: tuple[Coverage, ...]
    graphs: GraphRecord
    placements: Placements | None

    def write(self, graph: ModelGraph, writer: EngineWriter) -> None:
        """Write the files of report/ except the page. graph: that came out of the passes."""
        for name, text in (*self.graphs.files.items(), (NODES_NAME, self.graphs.nodes_text())):
            writer.write_text(name, text)
        writer.write_json(PASSES_NAME, [record.to_json() for record in self.passes])
        writer.write_json(COVERAGE_NAME, self.coverage)
        explanation = overview_lines(graph.info.name, Explanation(self.passes, self.coverage))
        writer.write_text(EXPLANATION_NAME, "".join(f"{line.text}\n" for line in explanation))
        if self.placements is not None:
            writer.write_json(PLACEMENTS_NAME, self.placements)
        tables = ((QUANTIZATION_NAME, graph.quantized), (SPARSITY_NAME, graph.sparse), (PRUNING_NAME, graph.pruned))
        for name, records in tables:
            if records:
                writer.write_json(name, records)

    def contents(
        self, graph: ModelGraph, writer: EngineWriter, manifest: Manifest, stages: Sequence[Program]
    ) -> EngineContents:
        """The contents of the page for the engine being written. stages: the programs of its pipeline stages."""
        return EngineContents(
            path=writer.path,
            manifest=manifest,
            program=joined_program(stages),
            stages=tuple(stages),
            passes=tuple(record.to_json() for record in self.passes),
            graphs=self.graphs.numbered(),
            provenance=self.graphs.provenance(),
            placements=self.placements,
            code=read_code(writer.files),
            quantized=graph.quantized,
            sparse=graph.sparse,
            pruned=graph.pruned,
        )


class BuildObserver:
    """An observer of run_pipeline that makes a BuildRecord. built_in: the names of llmc's own passes."""

    def __init__(self, captured: ModelGraph, built_in: Collection[str], options: BuildOptions) -> None:
        self._graphs = GraphRecord(captured)
        self._coverage = CoverageObserver(built_in, options)
        self._placements = PlacementObserver(options.pipeline_parallel_size)

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Record what a pass did."""
        for observer in (self._graphs, self._coverage, self._placements):
            observer(record, graph)

    def record(self, passes: tuple[PassRecord, ...]) -> BuildRecord:
        """The record of everything observed. passes: the records of all passes that ran."""
        return BuildRecord(passes, self._coverage.coverage(), self._graphs, self._placements.placements)
