"""Give each weight from 4 to 16 bits, so that their mean stays within a budget and the output changes least.

The value of each weight's bits is estimated (sensitivity.py), and bits are assigned (spend_bits.py). An estimate sums
the effects of single weights rounded to nearest; GPTQ leaves a fifth of that in most weights, and half in the output
projection. The estimates are therefore scaled to the measurements of two plans: a third of the weights at 4 bits, with
and without the projection.

And they only propose. The candidates are what is given out for this budget and, where it is on no place of a fixed
grid, for the place below it, and the schemes that are the same for all weights and fit. Each is carried out in full,
and the one whose output diverges least on held-out text is used.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from llmc.errors import OptionError
from llmc.formats.schemes import SCHEMES, Budget, Scheme
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.planned_weight import HEAD, with_schemes
from llmc.passes.quantization.plan import Planned, head_scheme
from llmc.passes.quantization.sensitivity import (
    Change,
    bits_of,
    by_module,
    elements_of,
    ladders,
    rounded,
    unit_schemes,
    units_of,
)
from llmc.passes.quantization.spend_bits import Rung, spend

# Budgets, in bits per weight, for which bits are distributed in addition to the requested one: a larger budget then has
# the candidate of a smaller one.
_GRID = 1 / 16
# A uniform scheme that is expected to diverge by more than this times the least is not carried out.
_HOPELESS = 2.0
# The plans that estimates are scaled to give bits to every third unit. A layer of a dense model has four, so that all
# kinds of weights are among them.
_SCALED_TO_EVERY = 3
_SMALLEST = 1e-12

SchemeOf = Mapping[str, Scheme | None]


class Measure(Protocol):
    """Measures plans."""

    def __call__(self, schemes: SchemeOf, *, is_rough: bool) -> float:
        """The divergence of the model with these schemes, by module."""


@dataclass(frozen=True)
class Candidate:
    """A plan of schemes for all units. name: the name for messages; for a uniform scheme, as the option spells it.
    schemes: the scheme of each unit. bits: bits per weight, in the mean over the model. divergence: the expected
    divergence."""

    name: str
    schemes: tuple[Scheme | None, ...]
    bits: float
    divergence: float

    @property
    def is_blocked(self) -> bool:
        """Whether a weight has a blocked format."""
        return any(scheme is not None and scheme.codes.is_blocked for scheme in self.schemes)


def choose_schemes(
    graph: ModelGraph,
    planned: Sequence[Planned],
    budget: Budget,
    sequences: Sequence[Tensor],
    data: ModelData,
    measure: Measure,
) -> tuple[tuple[Planned, ...], dict[str, str]]:
    """The plan with a scheme for every weight that no rule decides on, and for each of those the reason.

    measure: the divergence of the model with these schemes, by module; roughly if a scale is all that it is for.
    Raises OptionError for a budget that all at 4 bits exceed.
    """
    units = units_of([plan for plan in planned if not plan.is_ruled and plan.products])
    if not units:
        return tuple(planned), {}
    schemes_of = [unit_schemes(unit, budget) for unit in units]
    fixed = sum(bits_of(plan, plan.scheme) for plan in planned if plan.is_ruled and plan.products)
    elements = sum(elements_of(plan) for plan in planned if plan.products)
    _check_budget(units, schemes_of, budget, fixed, elements)
    rungs = ladders(graph, units, schemes_of, Change(rounded, bits_of), sequences, data)
    rough = partial(measure, is_rough=True)
    choice = _Choice(units, _scaled(units, rungs, rough), fixed, elements, budget)
    shortlist = choice.shortlist()
    candidates = data.told("candidates", shortlist, len(shortlist))
    measured = [(measure(by_module(units, candidate.schemes), is_rough=False), candidate) for candidate in candidates]
    divergence, best = min(measured, key=lambda pair: pair[0])
    schemes = by_module(units, best.schemes)
    why = f"{best.name}, KL {divergence:.2e} on held-out text, the least of {len(measured)}"
    reasons = choice.reasons(best, [of_unit[0].divergence for of_unit in rungs])
    return with_schemes(planned, schemes), {module: f"{reason}; as in {why}" for module, reason in reasons.items()}


def _scaled(
    units: Sequence[Sequence[Planned]], rungs: Sequence[Sequence[Rung[Scheme]]], measure: Callable[[SchemeOf], float]
) -> Sequence[Sequence[Rung[Scheme]]]:
    """The rungs of the output projection, and those of all other weights, scaled to what they are measured to do."""
    heads = [i for i, unit in enumerate(units) if any(plan.module == HEAD for plan in unit)]
    if not heads or len(units) == 1:
        return rungs
    (head,) = heads
    sampled = range(0, len(units), _SCALED_TO_EVERY)
    with_head = tuple(r[0].scheme if i in sampled or i == head else None for i, r in enumerate(rungs))
    with_all = measure(by_module(units, with_head))
    # GPTQ rounds the projection last, so that this plan's codes are known from the one before.
    others = measure(by_module(units, tuple(None if i == head else scheme for i, scheme in enumerate(with_head))))
    expected = [of_unit[0].divergence for of_unit in rungs]
    of_head = (with_all - others) / max(expected[head], _SMALLEST)
    of_others = others / max(sum(expected[i] for i in sampled if i != head), _SMALLEST)
    scales = [max(of_head if i == head else of_others, _SMALLEST) for i in range(len(rungs))]
    return [
        [replace(rung, divergence=rung.divergence * scale) for rung in of_unit]
        for of_unit, scale in zip(rungs, scales, strict=True)
    ]


@dataclass(frozen=True)
class _Choice:
    """The choices. rungs: those of each unit. fixed: bits of weights that rules decide. elements: total number of
    elements."""

    units: Sequence[Sequence[Planned]]
    rungs: Sequence[Sequence[Rung[Scheme]]]
    fixed: float
    elements: int
    budget: Budget

    def shortlist(self) -> list[Candidate]:
        """The candidates to measure, in ascending bits, without duplicates."""
        given_out = self._given_out()
        uniform = least_of_blocked([candidate for candidate in self._uniform() if self._fits(candidate)])
        least = min(candidate.divergence for candidate in [*given_out, *uniform])
        hopeful = [candidate for candidate in uniform if candidate.divergence <= _HOPELESS * least]
        different = {candidate.schemes: candidate for candidate in [*given_out, *hopeful]}
        return sorted(different.values(), key=lambda candidate: candidate.bits)

    def reasons(self, candidate: Candidate, measured: Sequence[float]) -> dict[str, str]:
        """Return the reason for each module's scheme. measured: divergences of each unit alone, rounded to nearest at 4
        bits."""
        order = sorted(range(len(self.units)), key=lambda i: -measured[i])
        reasons: dict[str, str] = {}
        for rank, index in enumerate(order):
            least, scheme = self.rungs[index][0], candidate.schemes[index]
            expected = "" if scheme == least.scheme else f"; {self._expected(index, scheme):.2e} expected as chosen"
            for plan in self.units[index]:
                reasons[plan.module] = (
                    f"KL {measured[index]:.2e} at 4 bits, number {rank + 1} of {len(order)} in sensitivity{expected}"
                )
        return reasons

    def _fits(self, candidate: Candidate) -> bool:
        # Compare bits as they are printed: a budget of 4.85, the printed size of int4-gptq, must allow its 4.852 bits.
        return round(candidate.bits, 2) <= self.budget.bits

    def _given_out(self) -> list[Candidate]:
        """Return a plan for the budget, and one for the next lower place on the grid if the budget is not on it."""
        least = (self.fixed + sum(rungs[0].bits for rungs in self.rungs)) / self.elements
        below = math.floor(self.budget.bits / _GRID) * _GRID
        places = [bits for bits in dict.fromkeys((below, self.budget.bits)) if bits >= least]
        candidates = [self._candidate("bits given out", [rungs[0].scheme for rungs in self.rungs])]
        for bits in places:
            chosen = spend(self.rungs, bits * self.elements - self.fixed)
            schemes = [rungs[i].scheme for rungs, i in zip(self.rungs, chosen, strict=True)]
            candidates.append(self._candidate(f"bits given out for {bits:g}", schemes))
        return candidates[1:] or candidates

    def _uniform(self) -> list[Candidate]:
        """Every scheme for all weights, the output projection at 8 bits, as the plain option has it, or as the rest."""
        common = [s for s in (rung.scheme for rung in self.rungs[0]) if s is not None]
        schemes = [s for s in common if all(s in {rung.scheme for rung in rungs} for rungs in self.rungs)]
        method = self.budget.method
        more = SCHEMES["nf4"] if method == "rtn" else SCHEMES[f"int8-{method}"]
        if all(plan.shape[1] % (more.group or 1) == 0 for unit in self.units for plan in unit):
            schemes.append(more)
        candidates: list[Candidate] = []
        for scheme in schemes:
            head = head_scheme(scheme)
            apart = [head if any(plan.module == HEAD for plan in unit) else scheme for unit in self.units]
            candidates.append(self._candidate(scheme.name, apart))
            if head not in (scheme, replace(scheme, method="rtn")):
                candidates.append(self._candidate(f"{scheme.name},lm_head={scheme.name}", [scheme] * len(self.units)))
        return candidates

    def _candidate(self, name: str, schemes: Sequence[Scheme | None]) -> Candidate:
        pairs = zip(self.units, schemes, strict=True)
        bits = self.fixed + sum(bits_of(plan, scheme) for unit, scheme in pairs for plan in unit)
        divergence = sum(self._expected(index, scheme) for index, scheme in enumerate(schemes))
        return Candidate(name, tuple(schemes), bits / self.elements, divergence)

    def _expected(self, index: int, scheme: Scheme | None) -> float:
        """The divergence of the scheme's rung, or of the best rung with the same bits per code."""
        rungs = self.rungs[index]
        of_scheme = [rung for rung in rungs if rung.scheme == scheme]
        if not of_scheme and scheme is not None:
            of_scheme = [r for r in rungs if r.scheme is not None and r.scheme.code_bits == scheme.code_bits]
        return min(rung.divergence for rung in of_scheme)


def least_of_blocked(uniform: Sequence[Candidate]) -> list[Candidate]:
    """Uniform schemes that may be the best of all. Only one has a blocked format: the one that is expected to diverge
    least. One search fits all of these, so that their estimates are comparable; carrying out a plan takes as long as
    GPTQ."""
    blocked = sorted(
        (candidate for candidate in uniform if candidate.is_blocked), key=lambda candidate: candidate.divergence
    )
    return [*(candidate for candidate in uniform if not candidate.is_blocked), *blocked[:1]]


def _check_budget(
    units: Sequence[Sequence[Planned]],
    schemes_of: Sequence[Sequence[Scheme | None]],
    budget: Budget,
    fixed: float,
    elements: int,
) -> None:
    """Raise OptionError for a budget that all units at 4 bits exceed."""
    firsts = zip(units, schemes_of, strict=True)
    least = (fixed + sum(bits_of(plan, schemes[0]) for unit, schemes in firsts for plan in unit)) / elements
    if least > budget.bits:
        raise OptionError(
            f"the budget of {budget.bits} bits per weight is too small: all at 4 bits, with scales, take {least:.3f}",
            at=f"quantize=auto:{budget.bits}",
            fix=f"give at least auto:{least + 0.005:.2f}",
        )
