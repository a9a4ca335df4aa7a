"""How much the output diverges when the weights of one unit have fewer bits: measured for 4 bits, expected for more.

Weights that read the same input make one unit, since they are merged later. The sensitivity of a unit is measured: the
mean Kullback-Leibler divergence, over calibration tokens, of the model's next-token distribution from what it becomes
when this unit alone is rounded to 4 bits. All units are measured in one run of the graph that branches at each of
them, so that memory holds one layer of the weights. What smaller groups or more bits would leave of a divergence
follows from the rounding errors, each column's weighted by the square of its input: the divergence grows with their
square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx

from llmc.formats.schemes import Budget, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.plan import Planned, check_columns
from llmc.passes.quantization.round_weight import one_thread, round_to_nearest, row_chunks
from llmc.passes.quantization.spend_bits import Rung
from llmc.passes.quantization.stream import Stream

# Sequences and tokens of each that sensitivity is measured on: every unit takes a run of what comes after it.
_SEQUENCES, _TOKENS = 4, 128
_UNQUANTIZED_BITS = 16.0
# Rows of a weight that rounding errors are measured on.
_ROWS = 256


def ladders(
    graph: ModelGraph,
    units: Sequence[Sequence[Planned]],
    schemes_of: Sequence[Sequence[Scheme | None]],
    sequences: Sequence[Tensor],
    data: ModelData,
) -> list[list[Rung]]:
    """What each unit may be given, with the divergence measured for 4 bits and expected for the rest."""
    if not units:
        return []
    sequences = [ids[:_TOKENS] for ids in sequences[:_SEQUENCES]]
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
            Rung(
                scheme, sum(bits_of(each, scheme) for each in unit), divergences[branches[i] - 1] * error / errors[i][0]
            )
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


def units_of(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Weights that only products of the same input read, together."""
    units: dict[fx.Node, list[Planned]] = {}
    for each in planned:
        units.setdefault(call_arguments(each.products[0])["x"], []).append(each)
    return list(units.values())


def unit_schemes(unit: Sequence[Planned], budget: Budget) -> list[Scheme | None]:
    """What a unit may get, in ascending bits. Raises OptionError if no group of codes divides its columns."""
    *finer, eight = budget.schemes
    coded = [
        scheme
        for plain in finer
        for group in (plain, *(replace(plain, name=f"{plain.name}:g{g}", group=g) for g in (64, 32)))
        for scheme in (group, replace(group, name=f"{group.name}:asym", symmetric=False))
    ]
    fitting = [scheme for scheme in coded if all(each.shape[1] % (scheme.group or 1) == 0 for each in unit)]
    if not fitting:
        for each in unit:
            check_columns(each, coded[-1])
    return [*fitting, eight, None]


def elements_of(planned: Planned) -> int:
    rows, columns = planned.shape
    return rows * columns


def bits_of(planned: Planned, scheme: Scheme | None) -> float:
    return elements_of(planned) * (_UNQUANTIZED_BITS if scheme is None else scheme.bits(planned.shape[1]))
