"""The graph of a stage, from a model directory or an engine's report, with the origins of its nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.engine_format import read_engine
from llmc.engine_format.manifest import MANIFEST_NAME
from llmc.engine_format.reader import NODES_NAME
from llmc.errors import EngineFormatError, OptionError
from llmc.files.typed_json import REBUILD
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.graph.graph_text import GraphText, read_graph_text
from llmc.options import BuildOptions
from llmc.report.contents import Provenance, read_graphs, read_provenance

if TYPE_CHECKING:
    from llmc.passes.rewrite import Pass

STAGES = ("captured", "canonical", "serving", "optimized")


@dataclass(frozen=True)
class NodeOrigin:
    """The origin of a node. source: the model's line; rewrite: the rewrite that made the node. Each is None if there is
    none."""

    source: str | None = None
    rewrite: str | None = None


@dataclass(frozen=True)
class StageGraph:
    """A graph at a stage, to be drawn. title: the model's name and the stage. origins: by node name."""

    title: str
    graph: GraphText
    origins: dict[str, NodeOrigin]


def stage_graph(
    source: Path,
    stage: str,
    options: BuildOptions,
    passes: Sequence[Pass] | None = None,
    tokens: TokenDefault = DEFAULT_TOKENS,
) -> StageGraph:
    """The graph as it is when the stage's last pass has run; of stage captured, as torch.export gives it.

    source: a model directory, whose passes are run now, or an engine, whose report is read. passes: the default ones
    unless given. tokens: how the target rounds tokens by default. Raises OptionError for a stage that the pipeline did
    not reach, and what capture, passes and read_engine raise.
    """
    if stage not in STAGES:
        raise OptionError(f"{stage!r} is not a stage", at=f"--stage={stage}", fix=f"stages: {', '.join(STAGES)}")
    if (source / MANIFEST_NAME).exists():
        engine = read_engine(source, check_weights=False, check_machine=False)
        name, graphs, known = engine.manifest.model.name, read_graphs(engine.files), read_provenance(engine.files)
    else:
        name, graphs, known = _run(source, options, passes, tokens)
    texts = [read_graph_text(text, source) for _, _, text in graphs]
    reached = [text for text in texts if text.stage == stage]
    if not reached:
        stages = ", ".join(dict.fromkeys(text.stage for text in texts)) or "none"
        raise OptionError(
            f"there is no graph of stage {stage}; there are: {stages}",
            at=source,
            fix="choose one of these, or build the engine again with this llmc",
        )
    origins = {node: _origin(known, node, source) for node in known.nodes}
    return StageGraph(f"{name}, {stage}", reached[0] if stage == "captured" else reached[-1], origins)


def _origin(known: Provenance, node: str, engine: Path) -> NodeOrigin:
    match known.nodes[node]:
        case (None, str() | None as rewrite):
            return NodeOrigin(None, rewrite)
        case (int() as line, str() | None as rewrite) if 0 <= line < len(known.sources):
            return NodeOrigin(known.sources[line], rewrite)
    raise EngineFormatError(f"node {node!r:.80} has no line and rewrite", at=engine / NODES_NAME, fix=REBUILD)


def _run(
    model: Path, options: BuildOptions, passes: Sequence[Pass] | None, tokens: TokenDefault
) -> tuple[str, tuple[tuple[int, str, str], ...], Provenance]:
    from llmc.debug.dump import dumped
    from llmc.frontends.capture import capture
    from llmc.passes.model_data import ModelData
    from llmc.passes.pipeline import default
    from llmc.passes.runner import run_pipeline

    captured = capture(model, options)
    from llmc.report.graph_record import GraphRecord  # imports torch, which the graphs of an engine do without

    record = GraphRecord(captured.graph)
    data = ModelData(captured.source, captured.tokenizer, tokens=tokens)
    run_pipeline(captured.graph, passes or default(), options, dumped(captured.graph, record), data)
    return captured.graph.info.name, record.numbered(), record.provenance()


def json_text(stage: StageGraph) -> str:
    """{"title", "stage", "nodes": [{"name", "op", "type", "arguments", "inputs", "source", "rewrite"}], "returns"}."""
    nodes = [
        {"name": node.name, "op": node.op, **asdict(node), **asdict(stage.origins.get(node.name, NodeOrigin()))}
        for node in stage.graph.nodes
    ]
    content = {"title": stage.title, "stage": stage.graph.stage, "nodes": nodes, "returns": stage.graph.returns}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
