"""Give each weight 4, 8 or 16 bits, so that their mean stays within a budget and the output changes least.

Weights that read the same input make one unit, since they are merged later. The sensitivity of a unit is measured: the
mean Kullback-Leibler divergence, over calibration tokens, of the model's next-token distribution from what it becomes
when this unit alone is rounded to 4 bits. Then bits are given out greedily, where a bit buys the most of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import evaluate
from llmc.passes.model_data import ModelData
from llmc.passes.pattern import call_arguments
from llmc.passes.quantization.plan import Planned, check_columns
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.schemes import SCHEMES, Budget, Scheme

# Sequences and tokens of each that sensitivity is measured on: every unit takes a run of the whole model.
_SEQUENCES, _TOKENS = 4, 128
_UNQUANTIZED_BITS = 16.0


def choose_schemes(
    graph: ModelGraph,
    planned: Sequence[Planned],
    budget: Budget,
    sequences: Sequence[Tensor],
    data: ModelData,
) -> tuple[tuple[Planned, ...], dict[str, str]]:
    """The plan with a scheme for every weight that no rule decides on, and for each of those the reason.

    Raises OptionError for a budget that all at 4 bits exceed.
    """
    four = SCHEMES["int4"] if budget.method == "rtn" else SCHEMES[f"int4-{budget.method}"]
    units = _units([each for each in planned if not each.is_fixed and each.products])
    for unit in units:
        for each in unit:
            check_columns(graph, each, four)
    measured = [replace_tokens[:_TOKENS] for replace_tokens in sequences[:_SEQUENCES]]
    divergences = _sensitivities(graph, units, four, measured, data)
    ladder = (four, SCHEMES["int8"], None)
    chosen = _spend(units, divergences, ladder, budget, planned)
    order = sorted(range(len(units)), key=lambda i: -divergences[i])
    schemes: dict[str, Scheme | None] = {}
    reasons: dict[str, str] = {}
    for rank, index in enumerate(order):
        for each in units[index]:
            schemes[each.module] = ladder[chosen[index]]
            reasons[each.module] = (
                f"KL {divergences[index]:.2e} at 4 bits, number {rank + 1} of {len(units)} in sensitivity"
            )
    return (
        tuple(replace(each, scheme=schemes[each.module]) if each.module in schemes else each for each in planned),
        reasons,
    )


def _units(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Weights that only products of the same input read, together."""
    units: dict[fx.Node, list[Planned]] = {}
    for each in planned:
        units.setdefault(call_arguments(each.products[0])["x"], []).append(each)
    return list(units.values())


def _sensitivities(
    graph: ModelGraph, units: Sequence[Sequence[Planned]], scheme: Scheme, sequences: Sequence[Tensor], data: ModelData
) -> list[float]:
    weights = {n.name: evaluate(graph.weights[n.name], data.source) for n in graph.weight_nodes()}
    reference = [_log_probabilities(graph, weights, ids) for ids in sequences]
    found = []
    for done, unit in enumerate(units):
        data.progress("sensitivity", done, len(units))
        changed = dict(weights)
        for each in unit:
            rounded = round_to_nearest(weights[each.weights[0].name], scheme).values()
            changed |= {node.name: rounded.to(node.meta["val"].dtype) for node in each.weights}
        total = sum(
            float((log_p.exp() * (log_p - _log_probabilities(graph, changed, ids))).sum(-1).mean())
            for log_p, ids in zip(reference, sequences, strict=True)
        )
        found.append(max(total / len(sequences), 0.0))
    data.progress("sensitivity", len(units), len(units))
    return found


def _log_probabilities(graph: ModelGraph, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    inputs = {"input_ids": ids, "positions": torch.arange(len(ids))}
    return GraphInterpreter(graph.graph).outputs(weights | inputs).float().log_softmax(-1)


def _spend(
    units: Sequence[Sequence[Planned]],
    divergences: Sequence[float],
    ladder: Sequence[Scheme | None],
    budget: Budget,
    planned: Sequence[Planned],
) -> list[int]:
    """The step of the ladder for each unit. A step of 4 more bits leaves about 1/256 of a divergence, which grows with
    the square of the rounding error."""

    def cost(unit: Sequence[Planned], step: int) -> float:
        return sum(_bits(each, ladder[step]) for each in unit)

    elements = sum(_elements(each) for each in planned if each.products)
    left = budget.bits * elements - sum(_bits(e, e.scheme) for e in planned if e.is_fixed and e.products)
    left -= sum(cost(unit, 0) for unit in units)
    if left < 0:
        least = budget.bits - left / elements
        raise OptionError(
            f"the budget of {budget.bits} bits a weight is too small: all at 4 bits, with scales, take {least:.3f}",
            at=f"quantize=auto:{budget.bits}",
            fix=f"give at least auto:{least + 0.005:.2f}",
        )
    chosen = [0] * len(units)
    heap = [(-d / (cost(u, 1) - cost(u, 0)), i) for i, (d, u) in enumerate(zip(divergences, units, strict=True))]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        extra = cost(units[i], chosen[i] + 1) - cost(units[i], chosen[i])
        if extra > left:
            continue
        left -= extra
        chosen[i] += 1
        if chosen[i] + 1 < len(ladder):
            gain = divergences[i] / 256 / (cost(units[i], chosen[i] + 1) - cost(units[i], chosen[i]))
            heapq.heappush(heap, (-gain, i))
    return chosen


def _elements(planned: Planned) -> int:
    rows, columns = planned.shape
    return rows * columns


def _bits(planned: Planned, scheme: Scheme | None) -> float:
    return _elements(planned) * (_UNQUANTIZED_BITS if scheme is None else scheme.bits(*planned.shape))
