"""The newest rows of tables that are cut, which attention reads from other caches."""

import torch

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph


def newest_rows(graph: ModelGraph) -> int:
    """Return the number of newest rows that no cut may drop, because attention reads them from other caches; 0 for
    none."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)
    given = [call_arguments(node) for node in nodes]
    return max((int(each["recent"]) for each in given if each["recent_lens"] is not None), default=0)
