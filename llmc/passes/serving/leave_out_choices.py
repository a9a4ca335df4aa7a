"""Let attention see all keys if an indexer would choose all of them: up to the number of keys that it chooses.

    attention(q, k, v, …, chosen=choose_keys(q', k', weights, n))  ->  attention(q, k, v, …)
Must have: n is no less than the longest sequence of the engine. The indexer is dead code then.
Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (DSA).
"""

import torch

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Remove choices of no fewer keys than a sequence can have. Several layers may read one choice."""
    longest = options.max_model_len or graph.info.max_positions
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.choose_keys.default):
        count = call_arguments(node)["count"]
        if longest is None or count < longest:
            log.refuse(
                Refusal(f"{count} keys are chosen, of sequences of up to {longest or 'any number of'} tokens", node)
            )
            continue
        for reader in list(node.users):
            log.step(f"{reader.name} sees all keys", reader)
            reader.args, reader.kwargs = tuple((call_arguments(reader) | {"chosen": None}).values()), {}


leave_out_choices = GraphPass(
    "leave_out_choices",
    run,
    Numerics.EXACT,
    Stage.CANONICAL,
    unproved="which keys are chosen depends on numbers, which are symbols here",
)
