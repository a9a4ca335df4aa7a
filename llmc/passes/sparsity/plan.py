"""Which weights are made sparse and how: the option's rules against the products of a graph, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from llmc.errors import OptionError
from llmc.formats.sparsity import SparseScheme, Sparsity
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import stored_names
from llmc.passes.quantization.plan import HEAD, PRODUCTS, check_patterns, module_names, readers_of_weights


@dataclass(frozen=True)
class PlannedZeros:
    """One weight and its scheme, None to leave it alone. readers, weights: as in quantization/plan.py. tensor: of the
    checkpoint. is_ruled: a rule of the user's decided."""

    module: str
    tensor: str
    weights: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]
    scheme: SparseScheme | None
    is_ruled: bool

    @property
    def products(self) -> tuple[fx.Node, ...]:
        """The readers that multiply."""
        return tuple(node for node in self.readers if node.target in PRODUCTS)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.weights[0].meta["val"].shape
        return int(rows), int(columns)


def plan_zeros(graph: ModelGraph, sparsity: Sparsity) -> tuple[PlannedZeros, ...]:
    """Every product's and each embedding's weight that is dense, in the order in which the step reads them.

    Without a rule of its own the output projection stays as it is, since it decides on every token, and so do
    embeddings. Raises OptionError for a rule that names no module, for columns that a pattern does not divide, and for
    a method that looks at inputs where there is nothing but lookups.
    """
    planned = tuple(_planned(graph, readers, sparsity) for readers in readers_of_weights(graph))
    modules = [p.module for p in planned] + [w.module for w in graph.quantized]
    check_patterns((rule.pattern for rule in sparsity.rules), modules, "sparsity")
    for each in planned:
        _check_pattern(each)
        _check_input(each)
    return planned


def _planned(graph: ModelGraph, readers: Sequence[fx.Node], sparsity: Sparsity) -> PlannedZeros:
    weights = tuple(dict.fromkeys(call_arguments(node)["weight"] for node in readers))
    module, stored = module_names(graph, readers)
    tensor = next(iter(stored_names(graph.weights[weights[0].name])), weights[0].name)
    rule = sparsity.rule_for(module) or sparsity.rule_for(stored)
    multiplies = any(node.target in PRODUCTS for node in readers) and module != HEAD
    scheme = rule.scheme if rule is not None else sparsity.default if multiplies else None
    return PlannedZeros(module, tensor, weights, tuple(readers), scheme, rule is not None)


def _check_pattern(planned: PlannedZeros) -> None:
    scheme, (_, columns) = planned.scheme, planned.shape
    if scheme is None or scheme.pattern is None or columns % scheme.pattern[1] == 0:
        return
    raise OptionError(
        f"tensor {planned.tensor} has {columns} columns, which runs of {scheme.pattern[1]} do not divide",
        at=f"sparsity={scheme.name}",
        fix=f"choose a ratio for this one: --sparsity {planned.module}={scheme.method}:{scheme.ratio:g}",
    )


def _check_input(planned: PlannedZeros) -> None:
    scheme = planned.scheme
    if scheme is None or not scheme.needs_calibration or planned.products:
        return
    raise OptionError(
        f"tensor {planned.tensor} is looked up and multiplied with nothing, so {scheme.method} has no input to look at",
        at=f"sparsity={planned.module}={scheme.name}",
        fix=f"choose by size alone: --sparsity {planned.module}=magnitude:{scheme.ratio:g}, or =none",
    )
