"""Which weights are made sparse and how: the option's rules against the products of a graph, before any work."""

import math
from collections.abc import Sequence
from dataclasses import replace

from llmc.errors import OptionError
from llmc.formats.sparsity import SparseScheme, Sparsity
from llmc.graph.model_graph import ModelGraph
from llmc.passes.planned_weight import HEAD, PlannedWeight, plan_weights

PlannedZeros = PlannedWeight[SparseScheme]


def plan_zeros(graph: ModelGraph, sparsity: Sparsity) -> tuple[PlannedZeros, ...]:
    """Every product's and each embedding's weight that is dense, in the order in which the step reads them.

    Without a rule for it, the output projection stays dense, since it decides on every token, and so do embeddings.
    Raises OptionError for a rule that names no module, for columns that a pattern does not divide, for a ratio that is
    less than one element of every weight that it is for, and for a method that uses inputs if the weight is only
    looked up.
    """
    planned = tuple(
        replace(weight, scheme=None) if weight.module == HEAD and not weight.is_ruled else weight
        for weight in plan_weights(graph, sparsity, "sparsity")
    )
    for plan in planned:
        _check_pattern(plan)
        _check_input(plan)
    _check_ratios(planned)
    return planned


def is_free(planned: PlannedZeros) -> bool:
    """Whether a budget decides on a weight: not if a rule does, and not on the output projection's."""
    return bool(planned.products) and not planned.is_ruled and planned.module != HEAD


def _check_pattern(planned: PlannedZeros) -> None:
    scheme, (_, columns) = planned.scheme, planned.shape
    if scheme is None or scheme.pattern is None or columns % scheme.pattern[1] == 0:
        return
    raise OptionError(
        f"tensor {planned.tensor} has {columns} columns, which runs of {scheme.pattern[1]} do not divide",
        at=f"sparsity={scheme.name}",
        fix=f"choose a ratio for this one: sparsity={planned.module}={scheme.method}:{scheme.ratio:g}",
    )


def _check_ratios(planned: Sequence[PlannedZeros]) -> None:
    elements: dict[SparseScheme, tuple[int, str]] = {}
    for plan in planned:
        if plan.scheme is not None:
            of_one = math.prod(plan.shape) if plan.scheme.method == "magnitude" else plan.shape[1]
            elements[plan.scheme] = max(elements.get(plan.scheme, (0, "")), (of_one, plan.tensor))
    for scheme, (count, tensor) in elements.items():
        if round(scheme.ratio * count) == 0:
            part = "" if scheme.method == "magnitude" else "a row of "
            raise OptionError(
                f"{scheme.ratio:g} of the {count} elements of {part}{tensor} is less than one",
                at=f"sparsity={scheme.name}",
                fix=f"a larger ratio, such as {scheme.method}:0.5",
            )


def _check_input(planned: PlannedZeros) -> None:
    scheme = planned.scheme
    if scheme is None or not scheme.needs_calibration or planned.products:
        return
    raise OptionError(
        f"tensor {planned.tensor} is looked up and never multiplied, so {scheme.method} has no inputs to use",
        at=f"sparsity={planned.module}={scheme.name}",
        fix=f"choose by magnitude: sparsity={planned.module}=magnitude:{scheme.ratio:g}, or =none",
    )
