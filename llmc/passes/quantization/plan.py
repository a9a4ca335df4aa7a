"""Which weights are quantized and how: the option's rules against the products of a graph, checked before any work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.formats.module_rules import matches_module
from llmc.formats.schemes import BLOCK, Quantization, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored, stored_names

_llmc = torch.ops.llmc
_EXPERTS = _llmc.expert_linear.default
PRODUCTS = frozenset({_llmc.linear.default, _llmc.lm_head.default, _EXPERTS})
_EMBEDDING = _llmc.embedding.default
HEAD = "lm_head"


@dataclass(frozen=True)
class Planned:
    """One weight and its scheme, None to leave it alone.

    module: its name in the checkpoint without `.weight`, or lm_head. readers: the products and lookups that read it,
    in order. weights: its placeholders, more than one if it is tied. is_fixed: a rule of the user's decided.
    """

    module: str
    weights: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]
    scheme: Scheme | None
    is_fixed: bool

    @property
    def products(self) -> tuple[fx.Node, ...]:
        """The readers that multiply."""
        return tuple(node for node in self.readers if node.target in PRODUCTS)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.weights[0].meta["val"].shape
        return int(rows), int(columns)


def plan(graph: ModelGraph, quantization: Quantization) -> tuple[Planned, ...]:
    """Every product's weight, and each embedding that a rule names, in the order in which the step reads them.

    Raises OptionError for a rule that names no module, and for columns that a group does not divide.
    """
    planned = tuple(_planned(graph, nodes, quantization) for nodes in readers_of_weights(graph))
    modules = [p.module for p in planned] + [w.module for w in graph.quantized]
    check_patterns((rule.pattern for rule in quantization.rules), modules, "quantize")
    for each in planned:
        if each.scheme is not None:
            check_columns(graph, each, each.scheme)
    return planned


def readers_of_weights(graph: ModelGraph) -> tuple[tuple[fx.Node, ...], ...]:
    """The products and lookups of each weight that is not quantized, in order; tied placeholders count as one."""
    readers: dict[object, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.target in PRODUCTS or node.target is _EMBEDDING:
            weight = call_arguments(node)["weight"]
            if weight.name in graph.weights:
                recipe = graph.weights[weight.name]
                readers.setdefault(recipe if isinstance(recipe, Stored) else weight, []).append(node)
    return tuple(map(tuple, readers.values()))


def module_names(graph: ModelGraph, readers: Sequence[fx.Node]) -> tuple[str, str]:
    """What the weight of these readers is called: lm_head where one of them is that, and by the checkpoint alone."""
    weight = call_arguments(readers[0])["weight"].name
    stored = next(iter(stored_names(graph.weights[weight])), weight).removesuffix(".weight")
    return HEAD if any(node.target is _llmc.lm_head.default for node in readers) else stored, stored


def tensor_name(graph: ModelGraph, planned: Planned) -> str:
    """The weight's name in the checkpoint, for messages."""
    weight = planned.weights[0].name
    return next(iter(stored_names(graph.weights[weight])), weight)


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


def check_columns(graph: ModelGraph, planned: Planned, scheme: Scheme) -> None:
    """Raise OptionError if the scheme's groups do not divide the weight's columns."""
    width, (_, columns) = scheme.columns, planned.shape
    if width is None or columns % width == 0:
        return
    fits = [f"g{size}" for size in (64, 32) if columns % size == 0 and size < width]
    kind = "blocks" if scheme.granularity == "block" else "groups"
    instead = f"{scheme.name}:{fits[0]}" if (fits and width != BLOCK) or fits else "int8"
    raise OptionError(
        f"tensor {tensor_name(graph, planned)} has {columns} columns, which {kind} of {width} do not divide",
        at=f"quantize={scheme.name}",
        fix=f"choose another for all of them, or for this one: --quantize {planned.module}={instead}",
    )


def _planned(graph: ModelGraph, nodes: Sequence[fx.Node], quantization: Quantization) -> Planned:
    weights = tuple(dict.fromkeys(call_arguments(node)["weight"] for node in nodes))
    is_head = any(node.target is _llmc.lm_head.default for node in nodes)
    module, stored = module_names(graph, nodes)
    rule = quantization.rule_for(module) or quantization.rule_for(stored)
    if rule is not None:
        scheme = rule.scheme
    elif all(node.target is _EMBEDDING for node in nodes) or quantization.default is None:
        scheme = None
    else:
        scheme = head_scheme(quantization.default) if is_head else quantization.default
    if scheme is not None and any(node.target is _EXPERTS for node in nodes):
        scheme = replace(scheme, method="rtn")  # What methods look at is the input of all tokens, not of each expert's.
    return Planned(module, weights, tuple(nodes), scheme, rule is not None)


def check_patterns(patterns: Iterable[str], modules: Sequence[str], option: str) -> None:
    """Raise OptionError for the first pattern of an option's rules that no module's name matches."""
    for pattern in patterns:
        if not any(matches_module(pattern, module) for module in modules):
            last = sorted({module.rpartition(".")[2] for module in modules})
            near = difflib.get_close_matches(pattern, [*last, *modules], n=1)
            raise OptionError(
                f"no weight is called {pattern!r}",
                at=f"{option}={pattern}=…",
                fix=(f"did you mean {near[0]}? " if near else "") + f"names end in {', '.join(last)}",
            )
