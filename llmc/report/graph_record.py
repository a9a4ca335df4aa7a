"""Keep the graph after every pass as text, and where each node comes from, for the engine's report/ folder.

report/graphs/NN-pass.txt   after pass NN, if it changed anything; 00-captured.txt is the graph before the first pass
report/nodes.json           for every node of these: the model's source line, and the rewrite that made it
"""

import json

from llmc.engine_format.reader import GRAPHS
from llmc.files.typed_json import to_json
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.render import render
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.report.contents import Provenance


class GraphRecord:
    """An observer of run_pipeline."""

    def __init__(self, captured: ModelGraph) -> None:
        self._graphs: list[tuple[int, str, str]] = []
        self._passes = 0
        self._stage = Stage.CAPTURED
        self._sources: dict[str, int] = {}
        self._nodes: dict[str, tuple[int | None, str | None]] = {}
        self._keep("captured", captured)

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Keep the graph that came out of a pass, unless it is the one that went in."""
        self._passes += 1
        if record.rewrites or graph.stage is not self._stage:
            self._keep(record.name, graph)

    @property
    def files(self) -> dict[str, str]:
        """The texts of the graphs recorded until now, by their names in the engine."""
        return {f"{GRAPHS}/{number:02d}-{name}.txt": text for number, name, text in self._graphs}

    def nodes_text(self) -> str:
        """The text of nodes.json: {"sources": [line, …], "nodes": {name: [index of its line, rewrite]}}."""
        return json.dumps(to_json(self.provenance()), ensure_ascii=False, separators=(",", ":")) + "\n"

    def provenance(self) -> Provenance:
        """The provenance of the nodes in all graphs recorded until now."""
        return Provenance(tuple(self._sources), dict(self._nodes))

    def numbered(self) -> tuple[tuple[int, str, str], ...]:
        """Number and name of the pass that each graph came out of, and its text."""
        return tuple(self._graphs)

    def _keep(self, name: str, graph: ModelGraph) -> None:
        self._stage = graph.stage
        self._graphs.append((self._passes, name, render(graph)))
        for node in graph.graph.nodes:
            if node.name not in self._nodes and node.op == "call_function":
                source = source_line(node)
                number = None if source is None else self._sources.setdefault(source, len(self._sources))
                self._nodes[node.name] = (number, node.meta.get("rewrite"))
