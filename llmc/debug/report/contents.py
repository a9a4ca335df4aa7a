"""What an engine directory holds that a report shows, read once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmc.engine_format import Manifest
from llmc.engine_format.reader import GRAPHS, NODES_NAME, PASSES_NAME, read_quantization
from llmc.errors import EngineFormatError
from llmc.program import Program
from llmc.quantized_weight import QuantizedWeight
from llmc.typed_json import REBUILD

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineContents:
    """passes: as passes.json has them. graphs: (pass number, name, text), in order. sources: lines of the model's
    source; nodes: for each node name the index of its line and the rewrite that made it. code: by file name, the
    kernels' sources. quantized: what was done to each weight."""

    path: Path
    manifest: Manifest
    program: Program
    passes: list[dict[str, Any]]
    graphs: tuple[tuple[int, str, str], ...]
    sources: list[str]
    nodes: dict[str, list[Any]]
    code: dict[str, str]
    quantized: tuple[QuantizedWeight, ...]


def read_contents(path: Path, manifest: Manifest, program: Program) -> EngineContents:
    """Read the report's parts of an engine, finished or about to be. Raises EngineFormatError for a damaged one."""
    # An engine that was not made by `llmc build` may have no report.
    passes = _read(path / PASSES_NAME, _list) if (path / PASSES_NAME).exists() else []
    nodes = _read(path / NODES_NAME, _nodes) if (path / NODES_NAME).exists() else {"sources": [], "nodes": {}}
    return EngineContents(
        path=path,
        manifest=manifest,
        program=program,
        passes=passes,
        graphs=read_graphs(path),
        sources=nodes["sources"],
        nodes=nodes["nodes"],
        code=_read_code(path),
        quantized=read_quantization(path),
    )


def read_graphs(path: Path) -> tuple[tuple[int, str, str], ...]:
    """The graphs that an engine keeps: the number and name of the pass that each came out of, and its text."""
    found = []
    for file in sorted((path / GRAPHS).glob("[0-9]*-*.txt"), key=lambda file: int(file.name.partition("-")[0])):
        number, _, name = file.stem.partition("-")
        found.append((int(number), name, _read(file, str)))
    return tuple(found)


def _read_code(path: Path) -> dict[str, str]:
    files = [f for f in sorted((path / "kernels").rglob("*")) if f.suffix in (".cpp", ".py")]
    return {str(file.relative_to(path)): _read(file, str) for file in files}


def _read(path: Path, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineFormatError(f"cannot read it: {error.strerror}", at=path, fix=REBUILD) from None
    except ValueError as error:
        raise EngineFormatError(f"cannot be understood: {error}", at=path, fix=REBUILD) from None


def _list(text: str) -> list[dict[str, Any]]:
    content = json.loads(text)
    if not isinstance(content, list):
        raise ValueError("it is not a list")
    return content


def _nodes(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict) or not {"sources", "nodes"} <= content.keys():
        raise ValueError("it has no sources and nodes")
    return content
