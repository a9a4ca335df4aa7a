"""Take the units of one kind that add least out of every class of axes: what prune_channels and prune_heads share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.errors import OptionError
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.pruning import KINDS, Kind, Pruning
from llmc.graph.dead_code import remove_dead_code
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.options import BuildOptions
from llmc.passes.fusion.merge_qkv import merge_products
from llmc.passes.model_data import ModelData
from llmc.passes.parallel.propagate_placements import Placements
from llmc.passes.parallel.separate_products import separate
from llmc.passes.pruning.check_rules import CALLED, check_rules, less_than_one, units_that_go
from llmc.passes.pruning.contributions import choose_units
from llmc.passes.pruning.inner_axes import InnerAxes, inner_axes
from llmc.passes.pruning.take_out import keep_units
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite_log import RewriteLog


def prune_units(kind: Kind, graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Remove units, with one rewrite per class that loses some: those that contribute least in the graph before this
    pass.

    Raises OptionError if a rule for all of them can be applied to none, and for a rule that takes nothing.
    """
    pruning = options.pruning
    if not pruning.takes(kind):
        return
    apart = separate(graph, log)
    remove_dead_code(graph)
    placements = Placements(graph)
    if kind == "heads":  # the first of both passes: the second would see classes that are smaller already
        all_axes = [axes for each_kind in KINDS for axes in inner_axes(graph, placements, each_kind)]
        check_rules(graph, pruning, [axes for axes in all_axes if isinstance(axes, InnerAxes)])
    prunable, refusals = list[InnerAxes](), list[Refusal]()
    for candidate in inner_axes(graph, placements, kind):
        refusal = candidate if isinstance(candidate, Refusal) else _refusal(candidate, pruning)
        if refusal is not None:
            refusals.append(refusal)
            log.refuse(refusal)
        elif isinstance(candidate, InnerAxes):
            prunable.append(candidate)
    if prunable:
        stream = Stream(graph, data.source, calibration_sequences(graph, options, data))
        chosen = choose_units(stream, placements, prunable, lambda inner, energies: _kept(inner, energies, pruning))
        for inner, (kept, error) in zip(prunable, chosen, strict=True):
            _take_out(graph, placements, inner, kept, error, log)
    elif pruning.ratio_of_all(kind) > 0:
        raise _nothing(kind, graph, pruning, refusals)
    for linears in apart:
        log.step("one product again: " + " + ".join(linear.name for linear in linears), *linears)
        merge_products(graph, linears)


def _take_out(
    graph: ModelGraph, placements: Placements, inner: InnerAxes, kept: Tensor, error: float, log: RewriteLog
) -> None:
    gone = sorted(set(range(inner.count)) - set(kept.tolist()))
    log.step(f"{len(gone)} of {inner.count} {CALLED[inner.kind]} of {inner.module}", *inner.products)
    before = _parameters(inner)
    keep_units(graph, placements, inner, kept)
    part = PrunedPart(inner.module, inner.kind, tuple(gone), inner.count, error, before, _parameters(inner))
    graph.pruned = (*graph.pruned, part)


def _parameters(inner: InnerAxes) -> int:
    return sum(math.prod(node.meta["val"].shape) for node, _ in inner.weights)


def _kept(inner: InnerAxes, energies: Tensor, pruning: Pruning) -> Tensor:
    order = torch.argsort(energies, stable=True)
    return order[units_that_go(inner, pruning) :].sort().values


def _refusal(inner: InnerAxes, pruning: Pruning) -> Refusal | None:
    """Return why a class loses nothing, by the option's own words."""
    rule, ratio = pruning.rule_for(inner.modules), pruning.ratio(inner.kind, inner.modules)
    if ratio == 0:
        why = "no rule names it" if rule is None else f"{rule.pattern}=none"
        return Refusal(f"{inner.module} keeps its {CALLED[inner.kind]}: {why}", inner.products[0], is_asked=True)
    if units_that_go(inner, pruning) == 0:
        return Refusal(less_than_one(inner, ratio), inner.products[0])
    return None


def _nothing(kind: Kind, graph: ModelGraph, pruning: Pruning, refusals: Sequence[Refusal]) -> OptionError:
    reason = refusals[0].reason if refusals else f"no products of {graph.info.name} have {CALLED[kind]} between them"
    return OptionError(
        f"nothing can be taken out: {reason}",
        at=f"prune={kind}={pruning.ratio_of_all(kind):g}",
        fix=f"take a larger share, or leave {kind} out",
    )
