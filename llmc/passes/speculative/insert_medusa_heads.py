"""Add draft heads, which predict the tokens after the next one (Medusa: Cai et al. 2024, arXiv 2401.10774).

    logits = lm_head(h, w)
 -> the same, and as side outputs of each logit row the likeliest tokens of
    lm_head([h; h + silu(W_i·h + b_i)], w)             heads that share the model's output matrix
    lm_head(h + silu(W_i·h + b_i), w_i)                heads with their own matrices, perhaps of fewer tokens
Head i predicts the token i + 2 places after the row's. Several layers of a head follow each other. Ops on the model's
logits, such as a cap, also apply to the heads'. The first form is one product over L·(1 + H) rows, starting with the
logits: lowering uses it in place of the model's own (codegen/stand_ins.py), so that the output matrix is read once.
None of this runs in a step without drafts. Must have: logits of the requested rows, from an lm_head and pointwise ops
with constants. Heads' matrices that equal the model's own before quantization are shared; others are accepted if they
add at most half of the model's weights. Heads stay in the model's dtype in quantized engines: they are small, and the
output matrix keeps its storage.
Numerics: exact.
"""

from operator import getitem

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.draft_records import PREFIX, MedusaCheckpoint
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.speculative.fitting_heads import check_shapes, shares_output
from llmc.passes.speculative.projection import GATHER, Projection, projection_of
from llmc.program.step_outputs import CANDIDATES, DRAFT_IDS, DRAFT_LOGPROBS

_ops, _aten = torch.ops.llmc, torch.ops.aten


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Insert the heads that the graph was captured with, once."""
    checkpoint = graph.medusa
    if checkpoint is None or DRAFT_IDS in graph.side_outputs:
        return
    projection = projection_of(graph)
    check_shapes(graph, checkpoint, projection)
    shares = shares_output(graph, checkpoint, projection, data)
    log.step(f"{len(checkpoint.heads)} heads after {projection.product.name}", projection.product)
    with graph.graph.inserting_before(graph.graph.output_node()):
        insert = _insert_shared if shares else _insert_own
        ids, logprobs = insert(graph, checkpoint, projection)
    graph.add_side_output(DRAFT_IDS, ids)
    graph.add_side_output(DRAFT_LOGPROBS, logprobs)


insert_medusa_heads = WeightPass(
    "insert_medusa_heads", run, Numerics.EXACT, unproved="it adds results, of other weights"
)


def _insert_shared(graph: ModelGraph, checkpoint: MedusaCheckpoint, projection: Projection) -> tuple[fx.Node, fx.Node]:
    rows = [_hidden(graph, checkpoint, index, projection.hidden) for index in range(len(checkpoint.heads))]
    x = graph.graph.call_function(_aten.stack.default, ([projection.hidden, *rows], 1))
    if projection.arrival is not None:
        x = _again(graph, projection.arrival, projection.hidden, x)
    logits = _again(graph, projection.product, call_arguments(projection.product)["x"], x)
    top = _top_tokens(graph, _after(graph, projection, logits), None)
    # The first of each row's are those of the logits.
    ids, logprobs = (graph.graph.call_function(_aten.slice.Tensor, (tensor, 1, 1, 1 + len(rows))) for tensor in top)
    return ids, logprobs


def _insert_own(graph: ModelGraph, checkpoint: MedusaCheckpoint, projection: Projection) -> tuple[fx.Node, fx.Node]:
    outputs: list[fx.Node] = []
    matrices: dict[str, fx.Node] = {}
    for index, head in enumerate(checkpoint.heads):
        assert head.output is not None
        if head.output not in matrices:
            matrices[head.output] = _weight(graph, checkpoint, head.output, f"medusa_{index}_output", projection.hidden)
        x = _hidden(graph, checkpoint, index, projection.hidden)
        logits = graph.graph.call_function(_ops.lm_head.default, (x, matrices[head.output], None))
        outputs.append(_after(graph, projection, logits, is_whole=True))
    stacked = graph.graph.call_function(_aten.stack.default, (outputs, 1))
    token_map = None
    if checkpoint.token_map is not None:
        token_map = _weight(graph, checkpoint, checkpoint.token_map, "token_map", projection.hidden, torch.int32)
    return _top_tokens(graph, stacked, token_map)


def _hidden(graph: ModelGraph, checkpoint: MedusaCheckpoint, index: int, hidden: fx.Node) -> fx.Node:
    """The output of a head for hidden states."""
    x = hidden
    for layer, block in enumerate(checkpoint.heads[index].blocks):
        name = f"medusa_{index}_{layer}"
        weight = _weight(graph, checkpoint, block.weight, f"{name}_weight", hidden)
        bias = None if block.bias is None else _weight(graph, checkpoint, block.bias, f"{name}_bias", hidden)
        y = graph.graph.call_function(_ops.linear.default, (x, weight, bias))
        x = graph.graph.call_function(_aten.add.Tensor, (x, graph.graph.call_function(_aten.silu.default, (y,))))
    return x


def _weight(
    graph: ModelGraph,
    checkpoint: MedusaCheckpoint,
    tensor: str,
    name: str,
    hidden: fx.Node,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    """A placeholder for one tensor of the checkpoint, in the model's dtype unless another is given."""
    recipe = Stored(PREFIX + tensor, dtype or hidden.meta["val"].dtype)
    value = hidden.meta["val"].new_empty(checkpoint.source.shape(tensor), dtype=recipe.dtype)
    return new_weight(graph, name, recipe, value)


def _after(graph: ModelGraph, projection: Projection, logits: fx.Node, *, is_whole: bool = False) -> fx.Node:
    """Apply the model's ops on logits to these logits. is_whole: every rank has the logits of all tokens already."""
    before = projection.product
    for node in projection.after:
        if not (is_whole and node.target is GATHER):
            logits = _again(graph, node, before, logits)
        before = node
    return logits


def _again(graph: ModelGraph, node: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """The same call of something else."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new if n is old else n)
    return graph.graph.create_node("call_function", node.target, args, kwargs)


def _top_tokens(graph: ModelGraph, logits: fx.Node, token_map: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    count = min(CANDIDATES, int(logits.meta["val"].shape[-1]))
    top = graph.graph.call_function(_ops.top_tokens.default, (logits, count, token_map))
    ids, logprobs = (graph.graph.call_function(getitem, (top, i)) for i in range(2))
    return ids, logprobs
