"""The contents of an engine's report, read from its directory or passed in by the build that writes it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.engine_format import EngineFiles, Manifest
from llmc.engine_format.reader import (
    GRAPHS,
    NODES_NAME,
    PASSES_NAME,
    PLACEMENTS_NAME,
    STAGES,
    read_pruning,
    read_quantization,
    read_sparsity,
)
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.program import Program
from llmc.program.joined_program import joined_program
from llmc.report.placements.record import Placements


@dataclass(frozen=True)
class Provenance:
    """The contents of nodes.json. sources: lines of the model's source. nodes: for each node name, the index of its
    line and the number of the rewrite that made it, each None if there is none."""

    sources: tuple[str, ...] = ()
    nodes: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineContents:
    """The parts of an engine that its report shows.

    Args:
        path: The engine directory.
        manifest: Its manifest.
        program: The program, joined from the programs of all pipeline stages.
        stages: The program of each pipeline stage.
        passes: The records of passes.json.
        graphs: (pass number, name, text) of each stored graph, in order.
        provenance: The source line and rewrite of each node.
        placements: Each rank's part of the weights; None for a stage that a single rank runs.
        code: The kernels' sources by file name.
        quantized: The scheme and error of each quantized weight.
        sparse: The storage of each weight with zeros.
        pruned: The parameters that each part of the model lost.
    """

    path: Path
    manifest: Manifest
    program: Program
    stages: tuple[Program, ...]
    passes: tuple[dict[str, Any], ...]
    graphs: tuple[tuple[int, str, str], ...]
    provenance: Provenance
    placements: Placements | None
    code: dict[str, str]
    quantized: tuple[QuantizedWeight, ...]
    sparse: tuple[SparseWeight, ...]
    pruned: tuple[PrunedPart, ...]


def read_contents(files: EngineFiles, manifest: Manifest, *stages: Program) -> EngineContents:
    """Read the report's parts of an engine. Raises EngineFormatError for a damaged one."""
    return EngineContents(
        path=files.path,
        manifest=manifest,
        program=joined_program(stages),
        stages=stages,
        # An engine that was not made by `llmc build` may have no report.
        passes=files.parsed(PASSES_NAME, tuple[dict[str, Any], ...]) if PASSES_NAME in files else (),
        graphs=read_graphs(files),
        provenance=read_provenance(files),
        placements=read_placements(files),
        code=read_code(files),
        quantized=read_quantization(files),
        sparse=read_sparsity(files),
        pruned=read_pruning(files),
    )


def read_graphs(files: EngineFiles) -> tuple[tuple[int, str, str], ...]:
    """The graphs that an engine keeps: the number and name of the pass that each came out of, and its text."""
    graphs = []
    for file in files.below(GRAPHS):
        number, _, name = Path(file).stem.partition("-")
        if number.isdigit() and name:
            graphs.append((int(number), name, files.text(file)))
    return tuple(sorted(graphs))


def read_provenance(files: EngineFiles) -> Provenance:
    """Read the origins of the nodes of an engine's graphs, which are empty for an engine without a report."""
    return files.parsed(NODES_NAME, Provenance) if NODES_NAME in files else Provenance()


def read_placements(files: EngineFiles) -> Placements | None:
    """The placements of an engine; None if it has a single rank."""
    return files.parsed(PLACEMENTS_NAME, Placements) if PLACEMENTS_NAME in files else None


def read_code(files: EngineFiles) -> dict[str, str]:
    """The sources of the kernels by file name, of all stages in their order."""
    stages = sorted(files.below(STAGES), key=lambda file: (len(Path(file).parts[1]), file))
    sources = (*files.below("kernels"), *stages)
    return {file: files.text(file) for file in sources if Path(file).suffix in (".cpp", ".py")}
