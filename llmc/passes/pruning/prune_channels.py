"""Take the inner channels out of each MLP that add least to its output, as the option `prune` asks.

    down(act(gate(x)) * up(x))  ->  the same with fewer rows of gate and up, and fewer columns of down
Gated or plain, whatever lies between; a product that makes gate and up at once is taken apart for it and put together
again. Classes of axes say what goes together (inner_axes.py), contributions.py says how much each channel adds on
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
    """Every MLP, in order; then what zeros and codes need of the shapes that are left."""
    prune_units("channels", graph, options, log, data)
    if graph.pruned:
        check_plans(graph, options)


prune_channels = WeightPass("prune_channels", run, Numerics.LOSSY, budget=3.0)
