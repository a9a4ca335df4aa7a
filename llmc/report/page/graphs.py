"""The graphs as a report holds them: every line once, each graph a list of lines, with its layers marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.graph.graph_text import NodeText, read_node
from llmc.graph.repeats import node_token, repeats_of


def graphs_data(graphs: Sequence[tuple[int, str, str]], at: Path) -> dict[str, Any]:
    """{"lines": […], "graphs": [{"pass", "name", "stage", "nodes", "repeats"}]}.

    pass: its number, 0 for the captured graph. nodes: indices of lines, those of inputs and weights first as in the
    graph. repeats: [start, period, count] among the nodes that compute. Raises EngineFormatError.
    """
    table = _Lines(at)
    drawn = [table.graph(number, name, text) for number, name, text in graphs]
    return {"lines": list(table.numbers), "graphs": drawn}


class _Lines:
    """Lines that were seen, each read once: most of a graph is as it was before the pass."""

    def __init__(self, at: Path) -> None:
        self.numbers: dict[str, int] = {}
        self._at = at
        self._nodes: list[NodeText] = []
        self._tokens: dict[int, int] = {}
        self._known_tokens: dict[tuple[str, ...], int] = {}

    def graph(self, number: int, name: str, text: str) -> dict[str, Any]:
        first, *lines = text.splitlines()
        kept = [self._number(line) for line in lines if not line.startswith("return ")]
        working = [line for line in kept if self._nodes[line].op is not None]
        index = {self._nodes[line].name: i for i, line in enumerate(working)}
        tokens = [self._token(line, index) for line in working]
        inputs = [tuple(index[n] for n in self._nodes[line].inputs if n in index) for line in working]
        repeats = [[r.start, r.period, r.count] for r in repeats_of(tokens, inputs)]
        stage = first.removeprefix("stage ")
        return {"pass": number, "name": name, "stage": stage, "nodes": kept, "repeats": repeats}

    def _number(self, line: str) -> int:
        number = self.numbers.get(line)
        if number is None:
            node = read_node(line)
            if node is None:
                raise EngineFormatError(f"cannot read the line of a graph: {line[:80]!r}", at=self._at, fix=REBUILD)
            number = self.numbers[line] = len(self.numbers)
            self._nodes.append(node)
        return number

    def _token(self, line: int, computed: dict[str, int]) -> int:
        """A name stands for a placeholder or for a computed node in all of an engine's graphs."""
        if line not in self._tokens:
            key = node_token(self._nodes[line], computed)
            self._tokens[line] = self._known_tokens.setdefault(key, len(self._known_tokens))
        return self._tokens[line]
