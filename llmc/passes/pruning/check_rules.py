"""Refuse a rule of the option `prune` that asks for a share and gets nothing, before anything is taken out."""

import math
from collections.abc import Sequence

from llmc.errors import OptionError
from llmc.formats.module_rules import Rule
from llmc.formats.pruning import Kind, Pruning
from llmc.graph.model_graph import ModelGraph
from llmc.passes.pruning.inner_axes import InnerAxes

CALLED: dict[Kind, str] = {"channels": "inner channels", "heads": "KV heads"}


def units_that_go(inner: InnerAxes, pruning: Pruning) -> int:
    """The number of removed units of a class: never more than the requested share."""
    return math.floor(pruning.ratio(inner.kind, inner.modules) * inner.count + 1e-9)


def less_than_one(inner: InnerAxes, ratio: float) -> str:
    """Return why such a share of a class is nothing."""
    units = CALLED[inner.kind] if inner.count > 1 else CALLED[inner.kind].removesuffix("s")
    return f"{ratio:g} of the {inner.count} {units} of {inner.module} is less than one"


def check_rules(graph: ModelGraph, pruning: Pruning, classes: Sequence[InnerAxes]) -> None:
    """Raise OptionError for a rule of `prune` that removes nothing.

    classes: all axes that may lose units, of both kinds, because a rule may be for only one of them. A rule may name a
    layer that was dropped.
    """
    gone = [module for part in graph.pruned for module in part.modules]
    for rule in pruning.rules:
        if rule.scheme is None or any(map(rule.matches, gone)):
            continue
        own = [axes for axes in classes if pruning.rule_for(axes.modules) is rule]
        if not any(units_that_go(axes, pruning) for axes in own):
            raise _nothing(rule, rule.scheme, own)


def _nothing(rule: Rule[float], ratio: float, own: Sequence[InnerAxes]) -> OptionError:
    reason = "no weights of that name, and of no later rule, have channels or KV heads between them that can go"
    if own:
        reason = less_than_one(max(own, key=lambda axes: axes.count), ratio)
    return OptionError(
        f"{rule.pattern}={ratio:g} takes nothing out: {reason}",
        at=f"prune={rule.pattern}={ratio:g}",
        fix="take a larger share" if own else "name weights of an MLP or an attention, such as *.mlp.*=0.125",
    )
