"""Which weights are quantized and how: the option's rules against the products of a graph, checked before any work."""

from dataclasses import replace

from llmc.errors import OptionError
from llmc.formats.schemes import BLOCK, Quantization, Scheme
from llmc.graph.model_graph import ModelGraph
from llmc.passes.planned_weight import HEAD, PlannedWeight, plan_weights

Planned = PlannedWeight[Scheme]


def plan(graph: ModelGraph, quantization: Quantization) -> tuple[Planned, ...]:
    """Every product's weight, and each embedding that a rule names, in the order in which the step reads them.

    Raises OptionError for a rule that names no module, and for columns that a group does not divide.
    """
    planned = tuple(map(_fitted, plan_weights(graph, quantization, "quantize")))
    for each in planned:
        if each.scheme is not None:
            check_columns(each, each.scheme)
    return planned


def _fitted(planned: Planned) -> Planned:
    """With the scheme that is meant for such a product."""
    scheme = planned.scheme
    if scheme is not None and planned.module == HEAD and not planned.is_ruled:
        scheme = head_scheme(scheme)
    return replace(planned, scheme=scheme)


def head_scheme(scheme: Scheme) -> Scheme:
    """What the output projection gets if nothing is said of it: at least 8 bits, since it decides on every token, and
    no method that takes as much memory as its vocabulary is large."""
    plain = replace(scheme, method="rtn")
    if scheme.code_bits >= 8:
        return plain
    name = "w8a8" if scheme.activation == "int8" else "int8"
    return replace(
        plain, name=name, format="int8", granularity="channel", group=None, symmetric=True, is_static=scheme.is_static
    )


def check_columns(planned: Planned, scheme: Scheme) -> None:
    """Raise OptionError if the scheme's groups do not divide the weight's columns."""
    width, (_, columns) = scheme.columns, planned.shape
    if width is None or columns % width == 0:
        return
    fits = [f"g{size}" for size in (64, 32) if columns % size == 0 and size < width]
    kind = "blocks" if scheme.granularity == "block" else "groups"
    instead = f"{scheme.name}:{fits[0]}" if (fits and width != BLOCK) or fits else "int8"
    raise OptionError(
        f"tensor {planned.tensor} has {columns} columns, which {kind} of {width} do not divide",
        at=f"quantize={scheme.name}",
        fix=f"choose another for all of them, or for this one: quantize={planned.module}={instead}",
    )
