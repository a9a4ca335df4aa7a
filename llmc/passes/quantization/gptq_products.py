"""GPTQ's codes of products' weights: small weights that read the same input are swept together.

A sweep takes some ten operations per column, whatever the number of rows. Q, K and V of a small model take a third of
the time in one sweep, and have the same codes, since rows are rounded without one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from llmc.formats.schemes import Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_of_experts
from llmc.graph.weights import WeightSource, evaluate
from llmc.passes.quantization.column_sweep import InputSolvers
from llmc.passes.quantization.gptq import gptq
from llmc.passes.quantization.plan import Planned
from llmc.passes.quantization.round_weight import RoundedWeight

# Maximum number of rows of a sweep. Larger weights gain nothing, and memory holds several fp32 copies of the rows.
_MOST_ROWS = 4096


@dataclass
class ProductGptq:
    """The codes of weights in the order of a plan.

    Args:
        graph: the graph whose weights are rounded.
        source: the source of their values.
        solvers: the solvers by input.
        planned: all weights of the plan, in order.
    """

    graph: ModelGraph
    source: WeightSource
    solvers: InputSolvers
    planned: Sequence[Planned]
    _ahead: dict[str, RoundedWeight] = field(default_factory=dict)

    def codes(self, planned: Planned, weight: Tensor) -> RoundedWeight:
        """The codes of a weight [rows, columns] at its first product, while the stream holds that product's input."""
        ahead = self._ahead.pop(planned.module, None)
        if ahead is not None:
            return ahead
        self._ahead.clear()  # The plan took these codes from another plan.
        scheme, x = planned.scheme, _input(planned)
        assert scheme is not None
        others = self._same_input(planned, scheme, x)
        weights = [weight, *(evaluate(self.graph.weights[member.weights[0].name], self.source) for member in others)]
        kept = [self._kept(plan, values) for plan, values in zip((planned, *others), weights, strict=True)]
        together = gptq(torch.cat(weights), self.solvers.of(x, scheme), scheme, _joined_masks(kept, weights))
        end = len(weight)
        for other in others:
            self._ahead[other.module] = together.rows(slice(end, end + other.shape[0]))
            end += other.shape[0]
        return together.rows(slice(len(weight)))

    def _same_input(self, planned: Planned, scheme: Scheme, x: fx.Node) -> list[Planned]:
        """The weights to sweep with this one: later ones with its input and scheme, up to a number of rows."""
        rows, others = planned.shape[0], list[Planned]()
        if scheme.granularity in ("tensor", "block"):  # Rows share scales.
            return others
        start = next(i for i, candidate in enumerate(self.planned) if candidate.module == planned.module)
        for plan in self.planned[start + 1 :]:
            if plan.scheme != scheme or not plan.products or is_of_experts(plan.products[0]):
                continue
            if _input(plan) is x and rows + plan.shape[0] <= _MOST_ROWS:
                others.append(plan)
                rows += plan.shape[0]
        return others

    def _kept(self, planned: Planned, weight: Tensor) -> Tensor | None:
        """The elements of a sparse weight that are not zero; None for a weight that is not sparse."""
        return weight != 0 if any(sparse.module == planned.module for sparse in self.graph.sparse) else None


def _input(planned: Planned) -> fx.Node:
    x = call_arguments(planned.products[0])["x"]
    assert isinstance(x, fx.Node)
    return x


def _joined_masks(kept: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    if all(mask is None for mask in kept):
        return None
    pairs = zip(kept, weights, strict=True)
    return torch.cat([torch.ones_like(weight, dtype=torch.bool) if mask is None else mask for mask, weight in pairs])
