"""Let adapters add to the sums of products, for the option `enable_lora`.

    linear(x, w, …)  ->  delta = lora(x, A, B, ranks, adapter_of_token);  linear(x, w, …, delta, adapter_of_token)
also fused_linear and gated_linear; where x has only rows for the wanted logits, adapter_of_logit_row. A, B and ranks
are pools, step inputs that the runtime fills; a product of merged weights (q, k and v) has one pool, in which each
module has a part with its own rank. Runs last: every product is the same as in an engine without adapters, so a token
without one gets the same bits, and a step without any makes the same launches. Which modules a merged weight is made
of, and in which order their rows are, is read off its recipe.
Must have: at most four modules a product, whose rows are all there (none pruned), and x with the channels that they
read. Numerics: exact, as long as no token has an adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import fx

from llmc.adapters.module_name import tail
from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.model_graph import Adaptable, ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import part_of, stored_rows, takes_adapters
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import add_step_input, is_of_logit_rows
from llmc.graph.weights import Constant, Derived, Recipe, stored_names
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import ADAPTERS, ROW_ADAPTERS, AdapterPools
from llmc.program.adapter_pools import MOST_PARTS, AdaptedModule, AdaptedProduct, RowRun

_llmc = torch.ops.llmc


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Plan the pools of all products, declare them as inputs, then change one product after the other."""
    if not graph.adaptable or graph.adapters is not None:
        return
    planned: list[tuple[fx.Node, AdaptedProduct]] = []
    refusals: list[Refusal] = []
    for node in graph.graph.nodes:
        adapted = _planned(graph, node, options)
        if isinstance(adapted, Refusal):
            log.refuse(adapted)
            refusals.append(adapted)
        elif adapted is not None:
            planned.append((node, adapted))
    if not planned:
        raise _nothing_to_change(graph, options, refusals)
    log.step("declare the pools of adapters", *graph.inputs()[:1])
    products = tuple(adapted_product for _, adapted_product in planned)
    graph.adapters = AdapterPools(options.max_loras, options.max_lora_rank, products)
    of_tokens = add_step_input(graph, ADAPTERS, ("T",), torch.int32)
    of_rows = add_step_input(graph, ROW_ADAPTERS, ("L",), torch.int32)
    pools = [_declare(graph, index, node) for index, (node, _) in enumerate(planned)]
    for (node, product), (a, b, ranks) in zip(planned, pools, strict=True):
        log.step(" + ".join(module.name for module in product.modules), node)
        adapters = of_rows if is_of_logit_rows(graph, node) else of_tokens
        ends = [module.end for module in product.modules]
        with graph.graph.inserting_before(node):
            delta = graph.graph.call_function(_llmc.lora.default, (_source(node), a, b, ranks, adapters, ends))
        node.kwargs = {**node.kwargs, "delta": delta, "adapters": adapters}


insert_adapters = GraphPass(
    "insert_adapters", run, Numerics.EXACT, Stage.OPTIMIZED, unproved="it adds inputs, the pools of adapters"
)


def _nothing_to_change(graph: ModelGraph, options: BuildOptions, refusals: Sequence[Refusal]) -> PassError:
    """The error for a model without products for adapters: names that no layer has, or what stands against each."""
    layers = sorted({adaptable.name.rpartition(".")[2] for adaptable in graph.adaptable})
    problem = "adapters can change none of the model's products"
    if refusals:
        problem += f": {refusals[0].reason}"
    at = f"lora_targets={','.join(options.lora_targets)}" if options.lora_targets else "enable_lora"
    fix = f"its layers are called {', '.join(layers)}" if options.lora_targets else "build without enable_lora"
    return PassError(problem, at=at, fix=fix)


def _planned(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> AdaptedProduct | Refusal | None:
    if not takes_adapters(node):
        return None
    weight = call_arguments(node)["weight"]
    stored = next(iter(stored_rows(weight).values())) if part_of(weight) is Part.STORAGE else weight
    if stored.name not in graph.weights:
        return Refusal(f"{weight.name} is computed in the step, not a weight", node)
    known = {adaptable.name: adaptable for adaptable in graph.adaptable}
    modules = modules_of_rows(graph.weights[stored.name], known)
    problem = modules if isinstance(modules, str) else _problem(node, modules)
    if problem is not None or isinstance(modules, str):
        return Refusal(f"{problem}", node)
    if options.lora_targets and not any(_is_target(module, options) for module in modules):
        return None
    source = _source(node).meta["val"]
    return AdaptedProduct(node.name, int(source.shape[-1]), modules[-1].end, DTYPE_NAMES[source.dtype], modules)


def _problem(node: fx.Node, modules: Sequence[AdaptedModule]) -> str | None:
    value, source = call_arguments(node)["weight"].meta["val"], _source(node).meta["val"]
    if len(modules) > MOST_PARTS:
        return f"it is made of {len(modules)} modules; adapters know {MOST_PARTS} at most"
    if modules[-1].end != value.shape[0]:
        return f"its weight has {value.shape[0]} rows, the modules that it is made of {modules[-1].end}"
    if source.dim() != 2:
        return f"x has shape {list(source.shape)}; adapters know [tokens, channels]"
    other = next((module for module in modules if module.inputs != source.shape[-1]), None)
    return None if other is None else f"x has {source.shape[-1]} channels, {other.name} reads {other.inputs}"


def _is_target(module: AdaptedModule, options: BuildOptions) -> bool:
    return any(module.name == target or module.name.endswith(f".{target}") for target in options.lora_targets)


def _source(product: fx.Node) -> fx.Node:
    """x before it was rounded, or put into the order of a weight's columns."""
    x: fx.Node = call_arguments(product)["x"]
    while part_of(x) is Part.ARRIVAL or x.target is _llmc.select_channels.default:
        x = call_arguments(x)["x"]
    return x


def _declare(graph: ModelGraph, index: int, node: fx.Node) -> tuple[fx.Node, ...]:
    assert graph.adapters is not None
    dtype = _source(node).meta["val"].dtype
    return tuple(
        add_step_input(graph, name, shape, torch.int32 if name.endswith("_ranks") else dtype)
        for name, shape in graph.adapters.shapes(index).items()
    )


_aten, _llmc = torch.ops.aten, torch.ops.llmc
# Ops that convert each row of a weight independently.
_STORED_BY_ROW = frozenset({_llmc.sparse_values.default, _llmc.sparse_masks.default})


def modules_of_rows(recipe: Recipe, known: Mapping[str, Adaptable]) -> tuple[AdaptedModule, ...] | str:
    """The modules in the order of the weight's rows, read off its recipe, or why it cannot be said. Weights may be
    numbers or codes."""
    if isinstance(recipe, Derived) and recipe.target is _aten.cat.default and recipe.args[1:] in ((), (0,)):
        parts: tuple[AdaptedModule, ...] = ()
        for part in recipe.args[0]:
            modules = modules_of_rows(part, known)
            if isinstance(modules, str):
                return modules
            start = parts[-1].end if parts else 0
            parts += tuple(replace(module, end=start + module.end) for module in modules)
        return parts
    if isinstance(recipe, Derived) and recipe.target is _aten.index_select.default and recipe.args[1] == 0:
        source, _, order = recipe.args
        modules = modules_of_rows(source, known)
        if isinstance(modules, str) or len(modules) != 1 or not isinstance(order, Constant):
            return modules if isinstance(modules, str) else "rows of several modules are mixed"
        rows = [row for run in modules[0].rows for row in range(run.first, run.first + run.count)]
        return (replace(modules[0], end=len(order.value), rows=_runs([rows[int(i)] for i in order.value])),)
    if isinstance(recipe, Derived) and recipe.target in _STORED_BY_ROW:
        return modules_of_rows(recipe.args[0], known)
    return _of_one(recipe, known)


def _of_one(recipe: Recipe, known: Mapping[str, Adaptable]) -> tuple[AdaptedModule, ...] | str:
    # A checkpoint's codes are called NAME::codes.
    names = dict.fromkeys(tail(name.partition("::")[0].removesuffix(".weight")) for name in stored_names(recipe))
    if len(names) != 1:
        return f"its weight is made of {len(names)} of the checkpoint's tensors, in a way that is not known"
    (name,) = names
    layer = known.get(name)
    if layer is None:
        return f"{name} is not a linear layer of the model"
    return (AdaptedModule(name, layer.inputs, layer.outputs, layer.outputs, (RowRun(0, layer.outputs),)),)


def _runs(rows: list[int]) -> tuple[RowRun, ...]:
    """Rows as runs of such that follow each other."""
    grouped = groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])
    return tuple(RowRun(run[0][1], len(run)) for _, group in grouped if (run := list(group)))
