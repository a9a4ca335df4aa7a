"""A graph as JSON: every node with its type, inputs and origin."""

import json

from llmc.debug.viz.stage_graph import NodeOrigin, StageGraph


def json_text(stage: StageGraph) -> str:
    """{"title", "stage", "nodes": [{"name", "op", "type", "arguments", "inputs", "source", "rewrite"}], "returns"}."""
    nodes = []
    for node in stage.graph.nodes:
        origin = stage.origins.get(node.name, NodeOrigin(None, None))
        nodes.append(
            {
                "name": node.name,
                "op": node.op,
                "type": node.type,
                "arguments": node.arguments,
                "inputs": node.inputs,
                "source": origin.source,
                "rewrite": origin.rewrite,
            }
        )
    content = {"title": stage.title, "stage": stage.graph.stage, "nodes": nodes, "returns": stage.graph.returns}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
