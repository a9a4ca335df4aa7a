"""Give each weight from 4 to 16 bits, so that their mean stays within a budget and the output changes least.

Weights that read the same input make one unit, since they are merged later. The sensitivity of a unit is measured: the
mean Kullback-Leibler divergence, over calibration tokens, of the model's next-token distribution from what it becomes
when this unit alone is rounded to 4 bits. All units are measured in one run of the graph that branches at each of
them, so that memory holds one layer of the weights. What smaller groups or 8 bits would leave of a divergence follows
from the rounding errors, each column's weighted by the square of its input: the divergence grows with their square.
Then the bits are given out so that what is expected in all is least. Groups may have zeros, which cost little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.plan import Planned, check_columns
from llmc.passes.quantization.round_weight import one_thread, round_to_nearest, row_chunks
from llmc.passes.quantization.stream import Stream
from llmc.schemes import SCHEMES, Budget, Scheme

# Sequences and tokens of each that sensitivity is measured on: every unit takes a run of what comes after it.
_SEQUENCES, _TOKENS = 4, 128
_UNQUANTIZED_BITS = 16.0
# What is left of a budget once all weights have 4 bits is given out in so many parts.
_BUDGET_PARTS = 20_000
# Rows of a weight that rounding errors are measured on.
_ROWS = 256


@dataclass(frozen=True)
class Rung:
    """A choice for a unit: bits of all its weights, and the divergence that is expected. scheme: None for none."""

    scheme: Scheme | None
    bits: float
    divergence: float


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
    units = _units([each for each in planned if not each.is_fixed and each.products])
    schemes_of = [_schemes(graph, unit, budget) for unit in units]
    left = _left(units, schemes_of, budget, planned)
    measured = [ids[:_TOKENS] for ids in sequences[:_SEQUENCES]]
    ladders = _ladders(graph, units, schemes_of, measured, data)
    chosen = spend(ladders, left + sum(ladder[0].bits for ladder in ladders))
    order = sorted(range(len(units)), key=lambda i: -ladders[i][0].divergence)
    schemes: dict[str, Scheme | None] = {}
    reasons: dict[str, str] = {}
    for rank, index in enumerate(order):
        rung, least = ladders[index][chosen[index]], ladders[index][0]
        for each in units[index]:
            schemes[each.module] = rung.scheme
            reasons[each.module] = (
                f"KL {least.divergence:.2e} at 4 bits, number {rank + 1} of {len(units)} in sensitivity"
                + (f"; {rung.divergence:.2e} expected as chosen" if rung is not least else "")
            )
    return (
        tuple(replace(each, scheme=schemes[each.module]) if each.module in schemes else each for each in planned),
        reasons,
    )


def spend(ladders: Sequence[Sequence[Rung]], bits: float) -> list[int]:
    """The rung of each ladder, so that all together take at most `bits` and diverge least.

    Each ladder's rungs in ascending bits; the first ones take no more than `bits` in all. Source: the multiple-choice
    knapsack problem, by dynamic programming over what is spent, in parts of the budget; each cost is rounded up.
    """
    left = bits - sum(ladder[0].bits for ladder in ladders)
    part = max(left, 1e-9) / _BUDGET_PARTS
    # Of the ladders so far: the least divergence by the parts spent, and the last one's rung for it.
    least = np.zeros(_BUDGET_PARTS + 1)
    rungs: list[npt.NDArray[np.int64]] = []
    for ladder in ladders:
        found = np.full((len(ladder), _BUDGET_PARTS + 1), np.inf)
        for row, cost, rung in zip(found, _costs(ladder, part), ladder, strict=True):
            if cost <= _BUDGET_PARTS:
                row[cost:] = least[: _BUDGET_PARTS + 1 - cost] + rung.divergence
        rungs.append(found.argmin(0))
        least = found.min(0)
    chosen: list[int] = []
    parts = _BUDGET_PARTS
    for ladder, of_ladder in zip(reversed(ladders), reversed(rungs), strict=True):
        chosen.append(int(of_ladder[parts]))
        parts -= _costs(ladder, part)[chosen[-1]]
    return chosen[::-1]


def _costs(ladder: Sequence[Rung], part: float) -> list[int]:
    return [math.ceil((rung.bits - ladder[0].bits) / part) for rung in ladder]


def _units(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Weights that only products of the same input read, together."""
    units: dict[fx.Node, list[Planned]] = {}
    for each in planned:
        units.setdefault(call_arguments(each.products[0])["x"], []).append(each)
    return list(units.values())


def _schemes(graph: ModelGraph, unit: Sequence[Planned], budget: Budget) -> list[Scheme | None]:
    """What a unit may get, in ascending bits. Raises OptionError if no group of 4-bit codes divides its columns."""
    name = "int4" if budget.method == "rtn" else f"int4-{budget.method}"
    four = [
        replace(scheme, name=scheme.name + zeros, symmetric=not zeros)
        for scheme in (SCHEMES[name], *(replace(SCHEMES[name], name=f"{name}:g{g}", group=g) for g in (64, 32)))
        for zeros in ("", ":asym")
    ]
    fitting = [scheme for scheme in four if all(each.shape[1] % (scheme.group or 1) == 0 for each in unit)]
    if not fitting:
        for each in unit:
            check_columns(graph, each, four[-1])
    return [*fitting, SCHEMES["int8"], None]


def _left(
    units: Sequence[Sequence[Planned]],
    schemes_of: Sequence[Sequence[Scheme | None]],
    budget: Budget,
    planned: Sequence[Planned],
) -> float:
    """Bits that the budget leaves when all units are at 4."""
    elements = sum(_elements(each) for each in planned if each.products)
    left = budget.bits * elements - sum(_bits(e, e.scheme) for e in planned if e.is_fixed and e.products)
    left -= sum(_bits(each, of_unit[0]) for unit, of_unit in zip(units, schemes_of, strict=True) for each in unit)
    if left < 0:
        least = budget.bits - left / elements
        raise OptionError(
            f"the budget of {budget.bits} bits a weight is too small: all at 4 bits, with scales, take {least:.3f}",
            at=f"quantize=auto:{budget.bits}",
            fix=f"give at least auto:{least + 0.005:.2f}",
        )
    return left


def _ladders(
    graph: ModelGraph,
    units: Sequence[Sequence[Planned]],
    schemes_of: Sequence[Sequence[Scheme | None]],
    sequences: Sequence[Tensor],
    data: ModelData,
) -> list[list[Rung]]:
    """What each unit may be given, with the divergence measured for 4 bits and expected for the rest."""
    if not units:
        return []
    stream = Stream(graph, data.source, sequences)
    unit_of = {reader: i for i, unit in enumerate(units) for each in unit for reader in each.readers}
    branches: dict[int, int] = {}
    errors: dict[int, list[float]] = {}
    for node in stream.stops(unit_of):
        index = unit_of[node]
        if index not in branches:
            data.progress("sensitivity", len(branches), len(units))
            branches[index] = stream.branch()
        each = next(each for each in units[index] if node in each.readers)
        weight = call_arguments(node)["weight"]
        values = stream.weight(weight)
        four = schemes_of[index][0]
        assert four is not None
        stream.replace_weight(branches[index], weight, round_to_nearest(values, four).values().to(values.dtype))
        if node is each.products[0]:
            importance = stream.rows(call_arguments(node)["x"]).float().square().mean(0)
            found = [_error(values, scheme, importance) for scheme in schemes_of[index]]
            errors[index] = [a + b for a, b in zip(errors.get(index, [0.0] * len(found)), found, strict=True)]
    divergences = _divergences(stream, len(sequences))
    data.progress("sensitivity", len(units), len(units))
    return [
        [
            Rung(scheme, sum(_bits(each, scheme) for each in unit), divergences[branches[i] - 1] * error / errors[i][0])
            for scheme, error in zip(schemes_of[i], errors[i], strict=True)
        ]
        for i, unit in enumerate(units)
    ]


def _error(weight: Tensor, scheme: Scheme | None, importance: Tensor) -> float:
    """The square of what rounding changes in the products of a weight, estimated from some of its rows."""
    if scheme is None:
        return 0.0
    step = -(-len(weight) // _ROWS)
    some = weight[::step]
    with one_thread():
        total = sum(
            float((round_to_nearest(rows, scheme).values() - rows).square_().mul_(importance).sum())
            for rows in row_chunks(some, scheme)
        )
    return max(total * len(weight) / len(some), 1e-30)


def _divergences(stream: Stream, sequences: int) -> list[float]:
    """The mean divergence of each branch from the plain run."""
    plain: list[Tensor] = []
    found: list[float] = []
    for index, logits in enumerate(stream.outputs()):
        log_q = logits.float().log_softmax(-1)
        if index < sequences:
            plain.append(log_q)
            continue
        log_p = plain[index % sequences]
        if index % sequences == 0:
            found.append(0.0)
        found[-1] += float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) / sequences
    return [max(each, 0.0) for each in found]


def _elements(planned: Planned) -> int:
    rows, columns = planned.shape
    return rows * columns


def _bits(planned: Planned, scheme: Scheme | None) -> float:
    return _elements(planned) * (_UNQUANTIZED_BITS if scheme is None else scheme.bits(planned.shape[1]))
