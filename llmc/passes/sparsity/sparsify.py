"""Make elements of weights zero, as the option `sparsity` asks.

    linear(x, w)  ->  linear(x, pruned(w))       the recipe of w changes: its elements where a mask says so, else zero
One rewrite for each weight. Comes after scales were folded into weights and before they are rounded, so that codes are
those of what is kept; store_sparse, the last but one of all passes, stores what is left without its zeros.
Must have: columns that the pattern divides; a weight that is not zero everywhere. Methods: magnitude, the largest
elements of the matrix are kept (of each run, with a pattern). Numerics: lossy.
"""

from __future__ import annotations

from torch import Tensor

from llmc.errors import CheckpointError, OptionError
from llmc.formats.sparse_weight import SparseWeight
from llmc.formats.sparsity import SparseScheme, Sparsity
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.weights import evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.sparsity.choose_zeros import kept_elements
from llmc.passes.sparsity.insert_zeros import prune_weight
from llmc.passes.sparsity.plan import PlannedZeros, plan_zeros


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Every planned weight, in the order in which the step reads them."""
    sparsity = options.zeros
    if sparsity.is_none:
        return
    done = {weight.module for weight in graph.sparse}
    planned = [each for each in plan_zeros(graph, sparsity) if each.module not in done]
    for each in planned:
        for product in each.products if each.scheme is None else ():
            log.refuse(Refusal(_why_not(each, sparsity), product, is_asked=True))
    chosen = [(each, each.scheme) for each in planned if each.scheme is not None]
    for index, (each, scheme) in enumerate(chosen):
        data.progress("sparsify", index, len(chosen))
        log.step(f"{each.module} to {scheme.name}", *each.readers)
        _sparsify(graph, each, scheme, data)
    data.progress("sparsify", len(chosen), len(chosen))


# Single logits of a model with half of its weights move by most of the logits' spread.
_BUDGET = 2.0
sparsify = WeightPass("sparsify", run, Numerics.LOSSY, budget=_BUDGET)


def _sparsify(graph: ModelGraph, planned: PlannedZeros, scheme: SparseScheme, data: ModelData) -> None:
    weight = evaluate(graph.weights[planned.weights[0].name], data.source)
    refuse_zeros(planned.tensor, weight)
    if scheme.method != "magnitude":
        raise OptionError(
            f"{scheme.method} is not there yet", at=f"sparsity={scheme.name}", fix=f"magnitude:{scheme.ratio:g}"
        )
    kept = kept_elements(weight.abs().float(), scheme, by_row=False)
    prune_weight(graph, planned, kept)
    graph.sparse = (*graph.sparse, sparse_record(planned, scheme, weight, kept))


def refuse_zeros(tensor: str, weight: Tensor) -> None:
    """Raise CheckpointError for a weight that is zero everywhere."""
    if not bool(weight.any()):
        raise CheckpointError(
            f"tensor {tensor} {list(weight.shape)} holds nothing but zeros",
            at=tensor,
            fix="download the checkpoint again, or check how it was made sparse",
        )


def sparse_record(planned: PlannedZeros, scheme: SparseScheme, weight: Tensor, kept: Tensor) -> SparseWeight:
    """Of a weight whose kept elements are as they were; the error is the weight's."""
    rows, columns = planned.shape
    squares = weight.float().square()
    lost = float(squares.masked_fill(kept, 0.0).sum() / squares.sum())
    return SparseWeight(
        module=planned.module,
        tensor=planned.tensor,
        scheme=scheme.name,
        rows=rows,
        columns=columns,
        zeros=1.0 - float((kept & (weight != 0)).sum()) / weight.numel(),
        error=lost**0.5,
    )


def _why_not(planned: PlannedZeros, sparsity: Sparsity) -> str:
    """Why a weight is left alone, by the option's own words."""
    rule = sparsity.rule_for(planned.module)
    if planned.is_ruled and rule is not None:
        return f"{rule.pattern}=none leaves {planned.module} dense"
    if sparsity.default is None:
        return f"no rule names {planned.module}, and there is no scheme for all"
    return f"{planned.module} decides on every token: it stays dense unless a rule names it"
