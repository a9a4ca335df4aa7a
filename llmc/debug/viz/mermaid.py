"""A drawing as Mermaid text, which Markdown viewers such as GitHub's draw."""

import json

from llmc.debug.viz.drawing import Drawing
from llmc.graph.graph_text import NodeText


def mermaid_text(drawing: Drawing) -> str:
    """A flowchart from top to bottom."""
    lines = ["---", f"title: {json.dumps(drawing.title, ensure_ascii=False)}", "---", "flowchart TB"]
    lines += [f"  {_id(node.name)}([{_label(node)}])" for node in drawing.inputs]
    lines += [f"  {_id(node.name)}[{_label(node)}]" for node in drawing.nodes]
    for number, layers in enumerate(drawing.layers):
        lines.append(f'  subgraph layers{number}["{layers.count} identical layers"]')
        lines += [f"    {_id(node.name)}[{_label(node)}]" for node in layers.nodes]
        lines.append("  end")
    for edge in drawing.edges:
        arrow = "-. next layer .->" if edge.carried else "-->"
        lines.append(f"  {_id(edge.source)} {arrow} {_id(edge.target)}")
    lines += [f"  {_id(name)} --> return{i}([return])" for i, name in enumerate(drawing.returns)]
    return "\n".join(lines) + "\n"


def _id(name: str) -> str:
    """`end` and other keywords of Mermaid are not valid names."""
    return f"n_{name}"


def _label(node: NodeText) -> str:
    title = node.name if node.op is None else node.op.removeprefix("llmc.").removeprefix("aten.")
    text = f"{title}<br/>{node.type}".replace('"', "#quot;")
    return f'"{text}"'
