"""Which weights are quantized and how: the option's rules against the products of a graph, checked before any work."""

from dataclasses import replace

from llmc.errors import OptionError
from llmc.formats.code_format import RUN_UNIT
from llmc.formats.scheme_text import ROUNDING, SHARING, names_run, parse_scheme
from llmc.formats.schemes import GROUPS, SCHEMES, Quantization, Scheme, on_target
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.planned_weight import HEAD, PlannedWeight, plan_weights

Planned = PlannedWeight[Scheme]


def plan(graph: ModelGraph, quantization: Quantization) -> tuple[Planned, ...]:
    """Every product's weight, and each embedding that a rule names, in the order in which the step reads them.

    Raises OptionError for a rule that names no module, and for columns that no group divides.
    """
    return tuple(map(_fitted, plan_weights(graph, quantization, "quantize")))


def asked(options: BuildOptions, data: ModelData) -> Quantization:
    """The schemes of `quantize` for the build's target. In float32, only schemes that round tokens anyway do so."""
    return on_target(options.quantization, data.tokens.in_dtype(options.dtype))


def _fitted(planned: Planned) -> Planned:
    """Return the plan with the scheme for such a product, in groups that divide its columns. Raises OptionError."""
    scheme = planned.scheme
    if scheme is None:
        return planned
    if planned.module == HEAD and not planned.is_ruled:
        scheme = head_scheme(scheme)
    return replace(planned, scheme=fitted(planned, scheme))


def head_scheme(scheme: Scheme) -> Scheme:
    """The default scheme of the output projection: at least 8 bits, because it decides every token, and no method whose
    memory grows with the vocabulary."""
    if scheme.code_bits >= 8:
        return replace(scheme, method="rtn")
    if scheme.activation != "int8":
        return SCHEMES["int8"]
    rounding = (word for word in scheme.name.split(":") if word in ROUNDING)
    of_head = parse_scheme(":".join(("w8a8", *rounding)))
    assert of_head is not None, "a scheme of options is none without codes"
    return of_head


def fitted(planned: Planned, scheme: Scheme) -> Scheme:
    """The scheme in the largest groups that divide a weight's columns, or those that it names. Raises OptionError."""
    columns = planned.shape[1]
    fitting = scheme.fitted(columns)
    if fitting is not None:
        return fitting
    raise OptionError(
        f"tensor {planned.tensor} has {columns} columns, which {_sharing(scheme)} do not divide",
        at=f"quantize={scheme.name}",
        fix=f"choose another for all of them, or for this one: quantize={planned.module}={_instead(scheme, columns)}",
    )


def _sharing(scheme: Scheme) -> str:
    """The groups, blocks or super-blocks of a scheme, with their numbers of columns."""
    if scheme.run is not None:
        return f"super-blocks of {scheme.run}"
    if scheme.codes.is_blocked:
        return f"groups of {RUN_UNIT}"
    kind = "blocks" if scheme.granularity == "block" else "groups"
    return f"{kind} of {' or '.join(str(group.columns) for group in scheme.groups())}"


def _instead(scheme: Scheme, columns: int) -> str:
    """The nearest scheme that divides the columns."""
    if scheme.codes.run_of(columns) is not None:
        return _without_sharing(scheme)
    fits = [size for size in GROUPS if columns % size == 0 and "group" in scheme.codes.granularities]
    return f"{_without_sharing(scheme)}:g{fits[0]}" if fits else "int8"


def _without_sharing(scheme: Scheme) -> str:
    """The scheme's name without its group."""
    name, *words = scheme.name.split(":")
    return ":".join((name, *(word for word in words if word not in SHARING and not names_run(word))))
