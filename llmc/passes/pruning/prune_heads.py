"""Remove the KV heads of each attention that contribute least to its output, with the query heads that read them.

    o(attention(q(x), k(x), v(x)))  ->  the same with fewer rows of q, k and v, and fewer columns of o
The KV cache shrinks in proportion. Classes of axes relate query heads, KV heads, biases, sinks and norms; a fused QKV
product is split for this and merged again. contributions.py measures the contribution of each KV head on calibration
text. One rewrite for each attention.
Must have: the option `prune`; more than one KV head; no norm over the channels of all heads.
Numerics: lossy. The result is dense and smaller. Source: Ma et al. 2023, "LLM-Pruner".
"""

from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pruning.prune_units import prune_units
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Prune every attention, in order."""
    prune_units("heads", graph, options, log, data)


prune_heads = WeightPass("prune_heads", run, Numerics.LOSSY, budget=3.0)
