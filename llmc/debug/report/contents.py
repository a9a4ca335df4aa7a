"""What an engine directory holds that a report shows, read once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.program import Program
from llmc.program.joined_program import joined_program

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineContents:
    """passes: as passes.json has them. graphs: (pass number, name, text), in order. sources: lines of the model's
    source; nodes: for each node name the index of its line and the rewrite that made it. code: by file name, the
    kernels' sources. quantized: what was done to each weight. sparse: what became of each with zeros. pruned: what
    each part of the model lost. placements: as placements.json has them; None for a stage that a single rank runs.
    stages: the programs that `program` is joined of."""

    path: Path
    manifest: Manifest
    program: Program
    stages: tuple[Program, ...]
    passes: list[dict[str, Any]]
    graphs: tuple[tuple[int, str, str], ...]
    sources: list[str]
    nodes: dict[str, list[Any]]
    placements: dict[str, Any] | None
    code: dict[str, str]
    quantized: tuple[QuantizedWeight, ...]
    sparse: tuple[SparseWeight, ...]
    pruned: tuple[PrunedPart, ...]


def read_contents(files: EngineFiles, manifest: Manifest, *stages: Program) -> EngineContents:
    """Read the report's parts of an engine, finished or about to be. Raises EngineFormatError for a damaged one."""
    # An engine that was not made by `llmc build` may have no report.
    passes = _read(files, PASSES_NAME, _list) if PASSES_NAME in files else []
    nodes = _read(files, NODES_NAME, _nodes) if NODES_NAME in files else {"sources": [], "nodes": {}}
    return EngineContents(
        path=files.path,
        manifest=manifest,
        program=joined_program(stages),
        stages=stages,
        passes=passes,
        graphs=read_graphs(files),
        sources=nodes["sources"],
        nodes=nodes["nodes"],
        placements=_read(files, PLACEMENTS_NAME, _object) if PLACEMENTS_NAME in files else None,
        code=_read_code(files),
        quantized=read_quantization(files),
        sparse=read_sparsity(files),
        pruned=read_pruning(files),
    )


def read_graphs(files: EngineFiles) -> tuple[tuple[int, str, str], ...]:
    """The graphs that an engine keeps: the number and name of the pass that each came out of, and its text."""
    found = []
    for file in files.below(GRAPHS):
        number, _, name = Path(file).stem.partition("-")
        if number.isdigit() and name:
            found.append((int(number), name, files.text(file)))
    return tuple(sorted(found))


def _read_code(files: EngineFiles) -> dict[str, str]:
    """Of all stages, in their order."""
    stages = sorted(files.below(STAGES), key=lambda file: (len(Path(file).parts[1]), file))
    sources = (*files.below("kernels"), *stages)
    return {file: files.text(file) for file in sources if Path(file).suffix in (".cpp", ".py")}


def _read(files: EngineFiles, name: str, parse: Callable[[Any], _T]) -> _T:
    try:
        return parse(files.json(name))
    except ValueError as error:
        raise EngineFormatError(f"cannot be understood: {error}", at=files.path / name, fix=REBUILD) from None


def _list(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise ValueError("it is not a list")
    return content


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def _nodes(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or not {"sources", "nodes"} <= content.keys():
        raise ValueError("it has no sources and nodes")
    return content
