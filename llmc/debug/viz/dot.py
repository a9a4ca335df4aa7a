"""A drawing as Graphviz text, and as SVG where Graphviz is installed."""

import json
from collections.abc import Iterator, Mapping

from llmc.debug.viz.drawing import Drawing
from llmc.debug.viz.stage_graph import NodeOrigin
from llmc.errors import LlmcError
from llmc.graph.graph_text import NodeText

_STYLE = """  rankdir=TB;
  fontname="Helvetica"; fontsize=14; labelloc=t;
  node [shape=box, style="rounded,filled", fillcolor="#ffffff", color="#8b8e98", fontname="Helvetica", fontsize=11];
  edge [color="#8b8e98", arrowsize=0.6];"""


def dot_text(drawing: Drawing, origins: Mapping[str, NodeOrigin]) -> str:
    """A digraph whose nodes have the line of the model's source as a tooltip."""
    lines = ["digraph llmc {", f"  label={_quoted(drawing.title)};", _STYLE]
    lines += [f'  {_quoted(n.name)} [label={_label(n)}, shape=ellipse, fillcolor="#e8edff"];' for n in drawing.inputs]
    lines += [f"  {_node(node, origins)}" for node in drawing.nodes]
    for number, layers in enumerate(drawing.layers):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(
            f'    label={_quoted(f"{layers.count} identical layers")}; style="rounded,dashed"; color="#8b8e98";'
        )
        lines += [f"    {_node(node, origins)}" for node in layers.nodes]
        lines.append("  }")
    for edge in drawing.edges:
        carried = ' [style=dashed, constraint=false, xlabel="next layer", fontsize=9]' if edge.carried else ""
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{carried};")
    lines += _returns(drawing)
    return "\n".join([*lines, "}"]) + "\n"


def svg_text(drawing: Drawing, origins: Mapping[str, NodeOrigin]) -> str:
    """The drawing laid out. Raises LlmcError where the package or Graphviz itself is missing."""
    try:
        import graphviz
    except ImportError:
        raise LlmcError(
            "SVG needs the Python package graphviz",
            at="--format svg",
            fix="pip install 'llmc-compiler[viz]', or write --format dot and lay it out elsewhere",
        ) from None
    try:
        return str(graphviz.Source(dot_text(drawing, origins)).pipe(format="svg", encoding="utf-8"))
    except graphviz.ExecutableNotFound:
        raise LlmcError(
            "SVG needs Graphviz, whose program `dot` is not on the PATH",
            at="--format svg",
            fix="install Graphviz (apt install graphviz, brew install graphviz), or write --format dot",
        ) from None
    except graphviz.CalledProcessError as error:
        raise LlmcError(f"dot failed: {str(error)[:200]}", at="--format svg", fix="write --format dot") from None


def _node(node: NodeText, origins: Mapping[str, NodeOrigin]) -> str:
    origin = origins.get(node.name)
    parts = [part for part in (origin.rewrite, origin.source) if part] if origin is not None else []
    tooltip = "\n".join([f"{node.name} = {node.op}({node.arguments})", *parts])
    color = ', fillcolor="#eef4ff", color="#3b5bdb"' if str(node.op).startswith("llmc.") else ""
    return f"{_quoted(node.name)} [label={_label(node)}, tooltip={_quoted(tooltip)}{color}];"


def _label(node: NodeText) -> str:
    title = node.name if node.op is None else node.op.removeprefix("llmc.").removeprefix("aten.")
    return _quoted(f"{title}\n{node.type}")


def _returns(drawing: Drawing) -> Iterator[str]:
    for i, name in enumerate(drawing.returns):
        yield f'  return_{i} [label="return", shape=plaintext, style="", fillcolor=none];'
        yield f"  {_quoted(name)} -> return_{i};"


def _quoted(text: str) -> str:
    """A DOT string: JSON's escapes for quotes, backslashes and line breaks mean the same there."""
    return json.dumps(text, ensure_ascii=False)
