"""Which weights an option is for: its rules against the products and lookups of a graph, before any work."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.formats.module_rules import LooksAtData, ModuleSchemes, Rule
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_lookup, is_product
from llmc.graph.weights import Stored, stored_names

_llmc = torch.ops.llmc
_ABSORBED = _llmc.head_linear.default
HEAD = "lm_head"
S = TypeVar("S", bound=LooksAtData)


@dataclass(frozen=True)
class PlannedWeight(Generic[S]):
    """One weight and its scheme, None to leave it alone.

    module: its name in the checkpoint without `.weight`, or lm_head. tensor: the name of the checkpoint's tensor, for
    messages. readers: the products and lookups that read it, in order. weights: its placeholders, more than one if it
    is tied. is_ruled: a rule of the user's decided.
    """

    module: str
    tensor: str
    weights: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]
    scheme: S | None
    is_ruled: bool

    @property
    def products(self) -> tuple[fx.Node, ...]:
        """The readers that multiply."""
        return tuple(node for node in self.readers if is_product(node))

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, columns = self.weights[0].meta["val"].shape
        return int(rows), int(columns)


def plan_weights(graph: ModelGraph, wanted: ModuleSchemes[S], option: str) -> tuple[PlannedWeight[S], ...]:
    """Every weight that is not quantized, in the order in which the step reads them: a product's with the default or
    what a rule says, one that is looked up only if a rule names it.

    Raises OptionError for a rule that names no module.
    """
    planned = tuple(_planned(graph, readers, wanted) for readers in readers_of_weights(graph))
    names = (module_names(graph, readers) for readers in readers_of_weights(graph))
    check_patterns(wanted.rules, modules_of(graph), option, {stored: module for module, stored in names})
    return planned


def _planned(graph: ModelGraph, readers: Sequence[fx.Node], wanted: ModuleSchemes[S]) -> PlannedWeight[S]:
    weights = tuple(dict.fromkeys(call_arguments(node)["weight"] for node in readers))
    module, stored = module_names(graph, readers)
    rule = wanted.rule_for(module, stored)
    multiplies = any(map(is_product, readers))
    scheme = rule.scheme if rule is not None else wanted.default if multiplies else None
    tensor = next(iter(stored_names(graph.weights[weights[0].name])), weights[0].name)
    return PlannedWeight(module, tensor, weights, tuple(readers), scheme, rule is not None)


def readers_of_weights(graph: ModelGraph) -> tuple[tuple[fx.Node, ...], ...]:
    """The products and lookups of each weight that is not quantized, in order; tied placeholders count as one."""
    readers: dict[object, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if is_product(node) or is_lookup(node):
            weight = call_arguments(node)["weight"]
            if weight.name in graph.weights:
                recipe = graph.weights[weight.name]
                readers.setdefault(recipe if isinstance(recipe, Stored) else weight, []).append(node)
    return tuple(map(tuple, readers.values()))


def module_names(graph: ModelGraph, readers: Sequence[fx.Node]) -> tuple[str, str]:
    """Return the name of the weight that these nodes read, and its name in the checkpoint.

    The two differ for the output matrix, whose name is lm_head.
    """
    weight = call_arguments(readers[0])["weight"].name
    stored = next(iter(stored_names(graph.weights[weight])), weight).removesuffix(".weight")
    return HEAD if any(node.target is _llmc.lm_head.default for node in readers) else stored, stored


def modules_of(graph: ModelGraph) -> list[str]:
    """Module names that rules may match: those of all weights, including weights with codes, of dropped layers, and in
    attentions."""
    dense = [module_names(graph, readers)[0] for readers in readers_of_weights(graph)]
    gone = [module for part in graph.pruned for module in part.modules]
    gone += [module_names(graph, (node,))[1] for node in graph.graph.find_nodes(op="call_function", target=_ABSORBED)]
    return [*dense, *(weight.module for weight in graph.quantized), *gone]


def check_patterns(
    rules: Iterable[Rule[Any]], modules: Sequence[str], option: str, stored: Mapping[str, str] | None = None
) -> None:
    """Raise OptionError for the first rule of an option whose pattern matches no module. stored: modules by their names
    in the checkpoint, such as an embedding that is also the output projection."""
    for rule in rules:
        if not any(map(rule.matches, modules)):
            tied = next((module for name, module in (stored or {}).items() if rule.matches(name)), None)
            last = sorted({module.rpartition(".")[2] for module in modules})
            near = [tied] if tied else difflib.get_close_matches(rule.pattern, [*last, *modules], n=1)
            raise OptionError(
                f"no weight is called {rule.pattern!r}",
                at=f"{option}={rule.pattern}=…",
                fix=(f"did you mean {near[0]}? " if near else "") + f"names end in {', '.join(last)}",
            )


def with_schemes(
    planned: Iterable[PlannedWeight[S]], schemes: Mapping[str, S] | Mapping[str, S | None]
) -> tuple[PlannedWeight[S], ...]:
    """A plan with these schemes, by module, instead of its schemes."""
    return tuple(replace(plan, scheme=schemes.get(plan.module, plan.scheme)) for plan in planned)


def why_not(planned: PlannedWeight[S], wanted: ModuleSchemes[S], left: str) -> str:
    """Return why a weight is left alone, by the option's own words. left: what it stays."""
    rule = wanted.rule_for(planned.module)
    if planned.is_ruled and rule is not None:
        return f"{rule.pattern}=none leaves {planned.module} {left}"
    if not wanted.is_for_all:
        return f"no rule names {planned.module}, and there is no scheme for all"
    return f"{planned.module} decides on every token: it stays {left} unless a rule names it"
