"""A graph as JSON: every node with its type, inputs and origin."""

import json
from dataclasses import asdict

from llmc.debug.viz.stage_graph import NodeOrigin, StageGraph


def json_text(stage: StageGraph) -> str:
    """{"title", "stage", "nodes": [{"name", "op", "type", "arguments", "inputs", "source", "rewrite"}], "returns"}."""
    nodes = [
        {"name": node.name, "op": node.op, **asdict(node), **asdict(stage.origins.get(node.name, NodeOrigin()))}
        for node in stage.graph.nodes
    ]
    content = {"title": stage.title, "stage": stage.graph.stage, "nodes": nodes, "returns": stage.graph.returns}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
