"""A pass from outside that gives every attention a cache policy."""

from __future__ import annotations

import torch

from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes import GraphPass
from llmc.passes.rewrite import Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import CachePolicy


def keep_less(policy: CachePolicy) -> GraphPass:
    """attention(…) -> attention(…, keeps=policy)"""

    def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default):
            if "keeps" not in node.kwargs:
                log.step(f"let the cache of {node.name} keep {policy}", node)
                node.update_kwarg("keeps", str(policy))

    return GraphPass("keep_less", run, Numerics.LOSSY, Stage.CANONICAL, after="check_canonical")
