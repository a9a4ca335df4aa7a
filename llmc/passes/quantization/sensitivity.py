"""How much the output diverges when the weights of one unit lose something: measured for one choice, expected for more.

Weights that read the same input make one unit, since they are merged later. The sensitivity of a unit is measured: the
mean Kullback-Leibler divergence, over calibration tokens, between the model's next-token distribution and the one with
only this unit changed, for example rounded to 4 bits. All units are measured in one run of the graph that branches at
each of them, so that memory holds one layer of the weights. The divergence of other choices, such as smaller groups,
more bits or fewer zeros, is estimated from the weights' errors, with each column weighted by the square of its input:
the divergence grows with their square.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from llmc.formats.module_rules import LooksAtData
from llmc.formats.schemes import Budget, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.parallel_map import one_thread, parallel_map
from llmc.passes.planned_weight import PlannedWeight
from llmc.passes.quantization.plan import Planned, fitted
from llmc.passes.quantization.reference_divergence import divergences, log_probabilities
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.passes.quantization.spend_bits import Rung
from llmc.passes.quantization.stream import Stream

S = TypeVar("S", bound=LooksAtData)
Choice = TypeVar("Choice")

# Maximum number of sequences, and of tokens in each, for measuring sensitivity. Every unit needs a run of the rest of
# the graph, so the time grows with the square of the depth: there is a limit of tokens over all units, but at least one
# sequence for each.
_SEQUENCES, _TOKENS = 4, 128
_OF_ALL_UNITS = 1 << 14
# Divergence is measured at every second token: the output projection, which all branches run, took 40% of the time, and
# what one token tells is close to what its neighbour does.
_EVERY = 2
_UNQUANTIZED_BITS = 16.0
# Rows of a weight that errors are measured on.
_ROWS = 64


@dataclass(frozen=True)
class Change(Generic[S]):
    """The effect of schemes on weights. value: the changed weight, from a weight [rows, columns], a scheme, and the
    mean squares of its columns' inputs (None if unknown). cost: a weight's share of the budget with a scheme, or with
    none. tried: the index of the scheme that is measured."""

    value: Callable[[Tensor, S, Tensor | None], Tensor]
    cost: Callable[[PlannedWeight[S], S | None], float]
    tried: int = 0

    def error(self, weight: Tensor, scheme: S | None, importance: Tensor) -> float:
        """The squared change of a weight's products, estimated from some of its rows."""
        if scheme is None:
            return 0.0
        sample = weight[:: -(-len(weight) // _ROWS)]
        total = float((self.value(sample, scheme, importance) - sample).float().square_().mul_(importance).sum())
        return max(total * len(weight) / len(sample), 1e-30)


def ladders(
    graph: ModelGraph,
    units: Sequence[Sequence[PlannedWeight[S]]],
    schemes_of: Sequence[Sequence[S | None]],
    change: Change[S],
    sequences: Sequence[Tensor],
    data: ModelData,
) -> list[list[Rung[S]]]:
    """The choices of each unit, with the divergence measured for one scheme and estimated for the rest."""
    if not units:
        return []
    sequences = measured_on(sequences, len(units))
    stream = Stream(graph, data.source, sequences)
    unit_of = {reader: i for i, unit in enumerate(units) for member in unit for reader in member.readers}
    branches: dict[int, int] = {}
    errors: dict[int, list[float]] = {}
    heads = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)
    for node in stream.stops({*unit_of, *heads}):
        if node not in unit_of:
            continue
        index = unit_of[node]
        if index not in branches:
            data.progress("sensitivity", len(branches), len(units))
            branches[index] = stream.branch()
        plan = next(member for member in units[index] if node in member.readers)
        weight = call_arguments(node)["weight"]
        values, schemes = stream.weight(weight), schemes_of[index]
        importance = stream.mean_squares(call_arguments(node)["x"]) if node in plan.products else None
        tried = schemes[change.tried]
        assert tried is not None
        with one_thread():
            stream.replace_weight(branches[index], weight, change.value(values, tried, importance).to(values.dtype))
        if node is plan.products[0] and importance is not None:
            scheme_errors = parallel_map(partial(change.error, values, importance=importance), schemes)
            errors[index] = [
                a + b for a, b in zip(errors.get(index, [0.0] * len(scheme_errors)), scheme_errors, strict=True)
            ]
    for head in heads:
        stream.thin(call_arguments(head)["x"], _EVERY)
    divergences = _divergences(stream, len(sequences), len(branches))
    data.progress("sensitivity", len(units), len(units))
    return [
        [
            Rung(
                scheme,
                sum(change.cost(member, scheme) for member in unit),
                divergences[branches[i] - 1] * error / errors[i][change.tried],
            )
            for scheme, error in zip(schemes_of[i], errors[i], strict=True)
        ]
        for i, unit in enumerate(units)
    ]


def measured_on(sequences: Sequence[Tensor], units: int) -> list[Tensor]:
    """The beginnings of some sequences: fewer for more units, since each of them reads them all."""
    count = min(_SEQUENCES, max(1, _OF_ALL_UNITS // (units * _TOKENS)))
    return [ids[:_TOKENS] for ids in sequences[:count]]


def _divergences(stream: Stream, sequences: int, branches: int) -> list[float]:
    """The mean divergence of each branch from the plain run."""
    output = stream.outputs()
    plain = parallel_map(lambda index: log_probabilities(output(index)), range(sequences))

    def divergence(index: int) -> float:
        return float(divergences(plain[index % sequences], output(index)).mean())

    per_sequence = parallel_map(divergence, range(sequences, sequences * (branches + 1)))
    return [max(sum(per_sequence[i : i + sequences]) / sequences, 0.0) for i in range(0, len(per_sequence), sequences)]


def units_of(planned: Sequence[PlannedWeight[S]]) -> list[list[PlannedWeight[S]]]:
    """Weights that only products of the same input read, together."""
    units: dict[fx.Node, list[PlannedWeight[S]]] = {}
    for plan in planned:
        units.setdefault(call_arguments(plan.products[0])["x"], []).append(plan)
    return list(units.values())


def by_module(units: Sequence[Sequence[PlannedWeight[Any]]], schemes: Sequence[Choice]) -> dict[str, Choice]:
    """The choice of each weight, from the choice of each unit."""
    return {plan.module: scheme for unit, scheme in zip(units, schemes, strict=True) for plan in unit}


def unit_schemes(unit: Sequence[Planned], budget: Budget) -> list[Scheme | None]:
    """The schemes a unit may get, in ascending bits. Raises OptionError if no group of codes divides its columns."""
    *finer, eight = budget.schemes
    coded = [
        scheme
        for plain in finer
        for group in plain.groups()
        for scheme in (group, replace(group, name=f"{group.name}:asym", symmetric=False))
    ]
    columns = unit[0].shape[1]  # The columns of all weights of the unit, which read the same input.
    fitting = [scheme for scheme in coded if columns % (scheme.group or 1) == 0]
    fitting += [scheme for scheme in budget.blocked if scheme.run_of(columns) is not None]
    fitting.sort(key=lambda scheme: scheme.bits(columns))
    if not fitting:
        for plan in unit:
            fitted(plan, finer[0])
    return [*fitting, eight, None]


def elements_of(planned: PlannedWeight[S]) -> int:
    """Number of elements of a weight."""
    rows, columns = planned.shape
    return rows * columns


def rounded(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """The weight rounded to nearest."""
    return round_to_nearest(weight, scheme).values()


def bits_of(planned: Planned, scheme: Scheme | None) -> float:
    return elements_of(planned) * (_UNQUANTIZED_BITS if scheme is None else scheme.bits(planned.shape[1]))
