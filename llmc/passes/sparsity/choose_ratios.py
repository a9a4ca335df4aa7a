"""Give each weight its own share of zeros, so that the mean is the requested one and the output changes least.

The cost of each weight's zeros is estimated (quantization/sensitivity.py), with zeros chosen by size and input only,
and the kept elements are assigned (quantization/spend_bits.py) within a distance of the mean. As with bits, the
estimates only propose: the plans of each distance, and the uniform one, are carried out in full, and the one with the
least divergence on held-out text is taken. On that text no model is worse than with a uniform share.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from llmc.formats.sparsity import SparseBudget, SparseScheme
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.sensitivity import Change, by_module, elements_of, ladders, units_of
from llmc.passes.quantization.spend_bits import Rung, spend
from llmc.passes.sparsity.choose_zeros import kept_elements
from llmc.passes.sparsity.plan import PlannedZeros

# Shares are so far from each other, and so far from the mean at most in the plans that are carried out.
_STEP = 0.025
_DISTANCES = (0.05, 0.1, 0.2)
# Range of the share of zeros in one weight.
_LEAST, _MOST = 0.05, 0.95

SchemeOf = Mapping[str, SparseScheme]


def choose_ratios(
    graph: ModelGraph,
    planned: Sequence[PlannedZeros],
    budget: SparseBudget,
    sequences: Sequence[Tensor],
    data: ModelData,
    measure: Callable[[SchemeOf], float],
) -> tuple[dict[str, SparseScheme], dict[str, str]]:
    """Return for each planned weight, by module, a scheme and the reason for it. measure: the divergence of the model
    with such schemes."""
    if not planned:
        return {}, {}
    units = units_of(planned)
    schemes_of = [_schemes(budget)] * len(units)
    change = Change(_pruned, _kept, tried=next(i for i, s in enumerate(schemes_of[0]) if s.ratio == budget.ratio))
    rungs = ladders(graph, units, schemes_of, change, sequences, data)
    candidates = {"the same for all": [budget.scheme(budget.ratio)] * len(units)}
    kept = sum(_kept(plan, budget.scheme(budget.ratio)) for plan in planned)
    for distance in _DISTANCES:
        candidates[f"given out within {distance:g} of {budget.ratio:g}"] = _given_out(rungs, budget, distance, kept)
    divergences = {
        name: measure(by_module(units, schemes))
        for name, schemes in data.told("candidates", candidates.items(), len(candidates))
    }
    best = min(divergences, key=divergences.__getitem__)
    why = f"{best}, KL {divergences[best]:.2e} on held-out text, the least of {len(divergences)}"
    return by_module(units, candidates[best]), _reasons(units, rungs, change.tried, why)


def _schemes(budget: SparseBudget) -> list[SparseScheme]:
    """The schemes a weight may get, by ascending number of kept elements."""
    steps = round(max(_DISTANCES) / _STEP)
    ratios = [round(budget.ratio + _STEP * step, 4) for step in range(steps, -steps - 1, -1)]
    return [budget.scheme(r) for r in ratios if _LEAST <= r <= _MOST or r == budget.ratio]


def _pruned(weight: Tensor, scheme: SparseScheme, importance: Tensor | None) -> Tensor:
    """The weight pruned by Wanda, or by magnitude."""
    is_magnitude = scheme.method == "magnitude" or importance is None
    worth = weight.abs().float() if importance is None or is_magnitude else weight.abs().float() * importance.sqrt()
    return weight.masked_fill(~kept_elements(worth, scheme, by_row=not is_magnitude), 0.0)


def _kept(planned: PlannedZeros, scheme: SparseScheme | None) -> float:
    return elements_of(planned) * (1.0 if scheme is None else 1.0 - scheme.ratio)


def _given_out(
    rungs: Sequence[Sequence[Rung[SparseScheme]]], budget: SparseBudget, distance: float, kept: float
) -> list[SparseScheme]:
    near = [[r for r in unit if abs(_scheme(r).ratio - budget.ratio) <= distance + _STEP / 2] for unit in rungs]
    return [_scheme(unit[i]) for unit, i in zip(near, spend(near, kept), strict=True)]


def _scheme(rung: Rung[SparseScheme]) -> SparseScheme:
    assert rung.scheme is not None
    return rung.scheme


def _reasons(
    units: Sequence[Sequence[PlannedZeros]], rungs: Sequence[Sequence[Rung[SparseScheme]]], tried: int, why: str
) -> dict[str, str]:
    """Return the reason for each module's scheme. rungs: the rungs of each unit alone."""
    order = sorted(range(len(units)), key=lambda i: -rungs[i][tried].divergence)
    return {
        plan.module: f"KL {rungs[i][tried].divergence:.2e} at {_scheme(rungs[i][tried]).ratio:g}, "
        f"number {rank + 1} of {len(order)} in sensitivity; as in {why}"
        for rank, i in enumerate(order)
        for plan in units[i]
    }
