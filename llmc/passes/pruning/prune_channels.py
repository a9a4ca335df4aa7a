"""Remove the inner channels of each MLP that contribute least to its output, for the option `prune`.

    down(act(gate(x)) * up(x))  ->  the same with fewer rows of gate and up, and fewer columns of down
The MLP may be gated or plain, with any ops between; a fused gate and up product is split for this and merged again.
Classes of axes relate the channels (inner_axes.py); contributions.py measures the contribution of each channel on
calibration text. Recipes select the rows and columns while weights stream. One rewrite for each MLP.
Must have: channels that products make and sum over, with nothing between that needs all of them at once.
Numerics: lossy. The result is dense and smaller. Source: Ma et al. 2023, "LLM-Pruner".
"""

from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pruning.prune_units import prune_units
from llmc.passes.quantization.check_quantizable import check_plans
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Prune every MLP, in order; then apply what zeros and codes require of the remaining shapes."""
    prune_units("channels", graph, options, log, data)
    if graph.pruned:
        check_plans(graph, options)


prune_channels = WeightPass("prune_channels", run, Numerics.LOSSY, budget=3.0)
