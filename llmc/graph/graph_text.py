"""Read back what graph/render.py writes: the nodes of a graph, without running or importing anything."""

import re
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD

_REFERENCE = re.compile(r"%(\w+)")
_CALL = re.compile(r"(?P<op>[\w.<>]+)\((?P<arguments>.*)\)", re.DOTALL)
_PLACEHOLDERS = ("input", "weight ", "constant ")
_LEAVES = ("weight '", 'weight "', "constant ")


@dataclass(frozen=True)
class NodeText:
    """One line. type: as float32[T, 64], or () for nothing. op: as llmc.linear, or None for a placeholder.

    arguments: as written, of a placeholder where its value comes from. inputs: the nodes named in the arguments.
    """

    name: str
    type: str
    op: str | None
    arguments: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class GraphText:
    """A graph at a stage. returns: the nodes that it returns."""

    stage: str
    nodes: tuple[NodeText, ...]
    returns: tuple[str, ...]


def read_graph_text(text: str, at: Path) -> GraphText:
    """Parse a text that `render` wrote. Raises EngineFormatError for any other text."""
    first, *lines = text.splitlines()
    if not first.startswith("stage "):
        raise EngineFormatError("the graph does not begin with its stage", at=at, fix=REBUILD)
    nodes: dict[str, NodeText] = {}
    returns: tuple[str, ...] = ()
    for number, line in enumerate(lines, 2):
        if line.startswith("return "):
            returns = tuple(_REFERENCE.findall(line))
            continue
        node = read_node(line)
        if node is None or any(name not in nodes for name in node.inputs if node.op is not None):
            raise EngineFormatError(f"line {number} is not a node:  {line[:80]!r}", at=at, fix=REBUILD)
        nodes[node.name] = node
    return GraphText(first.removeprefix("stage "), tuple(nodes.values()), returns)


def read_node(line: str) -> NodeText | None:
    """The node of a line `%name: type = op(arguments)`; None for any other line."""
    head, equals, body = line.partition(" = ")
    name, colon, kind = head.partition(": ")
    if not equals or not colon or not name.startswith("%"):
        return None
    call = _CALL.fullmatch(body)
    if body.startswith(_PLACEHOLDERS) or call is None:
        return NodeText(name[1:], kind, None, body, ())
    inputs = tuple(_REFERENCE.findall(call["arguments"]))
    if not inputs and any(word in call["arguments"] for word in _LEAVES):
        return NodeText(name[1:], kind, None, body, ())  # a weight that is made of others
    return NodeText(name[1:], kind, call["op"], call["arguments"], inputs)
