"""The contents of a graph's picture: operations without weights, and identical layers once."""

from dataclasses import dataclass

from llmc.debug.viz.stage_graph import StageGraph
from llmc.graph.graph_text import NodeText
from llmc.graph.repeats import Repeat, find_repeats


@dataclass(frozen=True)
class Edge:
    """From a node to one that takes it. carried: from one of several identical layers to the next."""

    source: str
    target: str
    carried: bool


@dataclass(frozen=True)
class Layers:
    """`count` identical layers, drawn as the nodes of the first."""

    count: int
    nodes: tuple[NodeText, ...]


@dataclass(frozen=True)
class Drawing:
    """A graph to be drawn. nodes: The nodes outside layers, in order. layers: The layers, in order. edges: The edges
    among all nodes."""

    title: str
    inputs: tuple[NodeText, ...]
    nodes: tuple[NodeText, ...]
    layers: tuple[Layers, ...]
    edges: tuple[Edge, ...]
    returns: tuple[str, ...]


def draw(stage: StageGraph, every_layer: bool) -> Drawing:
    """The drawing of a stage's graph. every_layer: Whether to draw identical layers separately instead of once."""
    working = [node for node in stage.graph.nodes if node.op is not None]
    inputs = [n for n in stage.graph.nodes if n.op is None and n.arguments == "input" and "kv_cache" not in n.name]
    repeats = () if every_layer else find_repeats(working)
    shown = {node.name: node.name for node in inputs}
    for i, node in enumerate(working):
        shown[node.name] = working[_stand_in(i, repeats)].name
    index = {node.name: i for i, node in enumerate(working)}
    edges = [
        Edge(shown[name], shown[node.name], carried=_stretch(i, repeats) == 1)
        for i, node in enumerate(working)
        for name in dict.fromkeys(node.inputs)
        # The second of several layers shows what the first hands on; the others say nothing new.
        if name in shown and (_stretch(i, repeats) == 0 or _is_handed_on(index.get(name), i, repeats))
    ]
    inside_layers = {i for r in repeats for i in range(r.start, r.end)}
    return Drawing(
        title=stage.title,
        inputs=tuple(inputs),
        nodes=tuple(node for i, node in enumerate(working) if i not in inside_layers),
        layers=tuple(Layers(r.count, tuple(working[r.start : r.start + r.period])) for r in repeats),
        edges=tuple(dict.fromkeys(edges)),
        returns=tuple(dict.fromkeys(shown.get(name, name) for name in stage.graph.returns)),
    )


def _repeat_of(index: int, repeats: tuple[Repeat, ...]) -> Repeat | None:
    return next((repeat for repeat in repeats if repeat.start <= index < repeat.end), None)


def _stand_in(index: int, repeats: tuple[Repeat, ...]) -> int:
    """The node that is drawn for this one."""
    repeat = _repeat_of(index, repeats)
    return index if repeat is None else repeat.start + (index - repeat.start) % repeat.period


def _stretch(index: int, repeats: tuple[Repeat, ...]) -> int:
    """Return the number of the repeated layer that a node is in, from 0; 0 outside of layers."""
    repeat = _repeat_of(index, repeats)
    return 0 if repeat is None else (index - repeat.start) // repeat.period


def _is_handed_on(source: int | None, target: int, repeats: tuple[Repeat, ...]) -> bool:
    """Whether a node of a second layer takes from the first."""
    repeat = _repeat_of(target, repeats)
    return (
        repeat is not None
        and source is not None
        and _stretch(target, repeats) == 1
        and repeat.start <= source < repeat.start + repeat.period
    )
