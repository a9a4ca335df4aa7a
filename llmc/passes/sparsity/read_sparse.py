"""Find the zeros that a checkpoint has in its weights, so that they need not be stored.

Samples some rows of each product's weight, and counts in those that have zeros there, unless the rows hold nothing
else: so a checkpoint without weights is not read for that. Changes no number. Checkpoints
that store masks have given the model's own weights by then, and are counted alike.
store_sparse, the last but one of all passes, stores what is found without its zeros.
Must have: a weight with at least a tenth of zeros, not in all of its rows. Numerics: exact.
"""

import torch
from torch import Tensor

from llmc.formats.sparse_weight import SparseWeight
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.refusal import Refusal
from llmc.graph.stored_codes import CodeSource
from llmc.graph.weights import evaluate, stored_names
from llmc.ops.sparse_weight import is_stored
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.planned_weight import module_names, readers_of_weights
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

# With fewer zeros masks take as much as they save.
LEAST_ZEROS = 0.1
_ROWS = 16
FOUND = "as stored"


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Note every weight with zeros that was not noted before."""
    if isinstance(data.source, CodeSource) and data.source.is_quantized:
        return  # Rounding also makes zeros, which no option asks to leave out.
    known = {weight.module for weight in graph.sparse}
    for readers in readers_of_weights(graph):
        module, _ = module_names(graph, readers)
        node = call_arguments(readers[0])["weight"]
        names = stored_names(graph.weights[node.name])
        products = [reader for reader in readers if is_product(reader)]
        if module in known or len(names) != 1 or not products:
            continue
        sample = _some_rows(data.source.load(names[0]))
        if sample.is_meta:
            return  # The record of a model without weights.
        if _zeros(sample) == 1.0:
            reason = f"{len(sample)} rows of {names[0]} hold nothing but zeros: it stays as it is"
            log.refuse(Refusal(reason, products[0]))
            continue
        if _zeros(sample) < LEAST_ZEROS:
            continue
        weight = evaluate(graph.weights[node.name], data.source)
        zeros, (rows, columns) = _zeros(weight), weight.shape
        if zeros >= LEAST_ZEROS:
            graph.sparse = (*graph.sparse, SparseWeight(module, names[0], FOUND, rows, columns, zeros))


read_sparse = WeightPass(
    "read_sparse", run, Numerics.EXACT, unproved="it changes nothing, but notes where weights are zero"
)


def _some_rows(weight: Tensor) -> Tensor:
    """Few enough that reading them is negligible in a build: a tensor's other rows are not read from its file."""
    step = max(1, weight.shape[0] // _ROWS)
    return weight[step // 2 :: step]


def _zeros(weight: Tensor) -> float:
    if not weight.dtype.is_floating_point:
        return 0.0
    return 1.0 - float(is_stored(weight).sum(dtype=torch.int64)) / weight.numel()
