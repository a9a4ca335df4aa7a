"""Cache the latent that keys and values are computed from: their up-projection moves into queries and outputs.

    kv = reshape(linear(c, W), [-1, H, n + e]);  attention(q, cat([kv[…, :n], expand(k)], 2), kv[…, n:], …)
        ->  y = attention(cat([q[…, n:], head_linear(q[…, :n], Wkᵀ)], 2), k, c, …, latent);  head_linear(y, Wv)
for c: [tokens, latent] and a part k: [tokens, 1, shared] that all heads have in common, rotated or not; Wk and Wv are
W's rows of each head. The cache then holds only c and k (docs/latent-attention.md). Prefill and decode have the same
form, so a token's bits do not depend on how its prompt was split. One rewrite for each attention.
Must have: keys and values of one product without a bias; fewer channels than all heads' keys and values have together;
no rule of `quantize` or `sparsity` for W, and no adapters on it. Stored codes of W become numbers: W is small, and its
products here are wider than those it was quantized for.
Numerics: reorder. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part, record_of
from llmc.graph.product_parts import part_of
from llmc.graph.refusal import Refused
from llmc.graph.weights import Derived, Recipe
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.planned_weight import module_names
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import is_one

aten = torch.ops.aten
_llmc = torch.ops.llmc
_ATTENTION = _llmc.attention.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every attention, in order. An attention whose keys or values are not channels of a product is not a
    candidate."""
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        site = _find(node)
        if site is None:
            continue
        with log.refusing():
            _check(graph, node, site, options)
            log.step(f"{node.name} over {site.latent.name}", node, site.product)
            _absorb(graph, node, site)


@dataclass(frozen=True)
class _PerHead:
    """Channels start to end of a product's result per head."""

    product: fx.Node
    start: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _Latent:
    """The sources of an attention's keys and values. product: the product of all, [tokens, heads · channels]. keys,
    values: the channels of each head. shared: the other part of a key, [tokens, 1, channels]; is_first: whether it
    comes first.
    """

    product: fx.Node
    keys: _PerHead
    values: _PerHead
    shared: fx.Node
    is_first: bool

    @property
    def latent(self) -> fx.Node:
        """The input of the product, as numbers."""
        x: fx.Node = call_arguments(self.product)["x"]
        return call_arguments(x)["x"] if part_of(x) is Part.ARRIVAL else x


def _find(node: fx.Node) -> _Latent | None:
    arguments = call_arguments(node)
    k, values = arguments["k"], _per_head(arguments["v"])
    if values is None or arguments["latent"] or k.target is not aten.cat.default:
        return None
    parts, dim = call_arguments(k)["tensors"], call_arguments(k)["dim"]
    if len(parts) != 2 or dim % 3 != 2:
        return None
    for index, part in enumerate(parts):
        keys, shared = _per_head(part), _shared(parts[1 - index])
        if keys is not None and keys.product is values.product and shared is not None:
            return _Latent(values.product, keys, values, shared, index == 1)
    return None


def _per_head(node: fx.Node) -> _PerHead | None:
    """The channels of slice(reshape(linear(x, w), [-1, heads, channels]), 2, start, end)."""
    span: tuple[int, int] | None = None
    if node.target is aten.slice.Tensor:
        arguments = call_arguments(node)
        if arguments["dim"] % node.meta["val"].dim() != 2 or arguments["step"] != 1:
            return None
        start = arguments["start"] or 0
        span, node = (start, start + int(node.meta["val"].shape[2])), arguments["self"]
    if node.target is not aten.reshape.default or node.meta["val"].dim() != 3:
        return None
    product, channels = node.all_input_nodes[0], int(node.meta["val"].shape[2])
    if product.target is not _llmc.linear.default or product.meta["val"].dim() != 2:
        return None
    return _PerHead(product, *(span or (0, channels)))


def _shared(node: fx.Node) -> fx.Node | None:
    """x: [tokens, 1, channels] of expand(x, [-1, heads, -1])."""
    if node.target is not aten.expand.default:
        return None
    (source,) = node.all_input_nodes
    shape = source.meta["val"].shape
    return source if len(shape) == 3 and is_one(shape[1]) else None


def _check(graph: ModelGraph, node: fx.Node, latent: _Latent, options: BuildOptions) -> None:
    product, q = call_arguments(latent.product), call_arguments(node)["q"]
    heads, expanded = q.meta["val"].shape[1], call_arguments(node)["k"].meta["val"].shape[1]
    if heads != expanded:
        raise Refused(f"{heads} query heads read {expanded} heads of keys, not one each", node)
    if product["bias"] is not None:
        raise Refused(f"keys and values have a bias, {product['bias'].name}", latent.product)
    kept = int(latent.latent.meta["val"].shape[1]) + int(latent.shared.meta["val"].shape[2])
    whole = heads * (q.meta["val"].shape[2] + latent.values.width)
    if kept >= whole:
        raise Refused(f"the latent and what is shared have {kept} channels, keys and values no more: {whole}", node)
    _recipe(graph, product["weight"])
    _check_options(graph, latent.product, options)


def _check_options(graph: ModelGraph, product: fx.Node, options: BuildOptions) -> None:
    """Refuse a weight that an option says something of, so that it must stay one."""
    if call_arguments(product)["weight"].name not in graph.weights:
        return
    module, _ = module_names(graph, (product,))
    for option, schemes in (("quantize", options.quantization), ("sparsity", options.zeros)):
        rule = schemes.rule_for(module)
        if rule is not None and rule.scheme is not None:
            raise Refused(f"{option} names {module} by {rule.pattern!r}", product)
    if any(module.endswith(adaptable.name) for adaptable in graph.adaptable):
        raise Refused(f"adapters may change {module} while the engine runs", product)


def _absorb(graph: ModelGraph, node: fx.Node, site: _Latent) -> None:
    arguments = call_arguments(node)
    q, latent, heads = arguments["q"], site.latent, int(arguments["q"].meta["val"].shape[1])
    rank, shared = int(latent.meta["val"].shape[1]), int(site.shared.meta["val"].shape[2])
    weight = call_arguments(site.product)["weight"]
    numbers = Derived(aten.reshape.default, (_recipe(graph, weight), (heads, -1, rank)))
    dtype = latent.meta["val"].dtype
    keys, values = (_rows(numbers, span, dtype) for span in (site.keys, site.values))

    def of_heads(name: str, recipe: Recipe, *shape: int) -> fx.Node:
        return new_weight(graph, f"{weight.name}_{name}", recipe, latent.meta["val"].new_empty((heads, *shape)))

    up = of_heads("keys", Derived(aten.transpose.int, (keys, 1, 2)), rank, site.keys.width)
    down = of_heads("values", values, site.values.width, rank)
    own = (shared, shared + site.keys.width) if site.is_first else (0, site.keys.width)
    rest = (0, shared) if site.is_first else (site.keys.width, site.keys.width + shared)
    call = graph.graph.call_function
    with graph.graph.inserting_before(node):
        absorbed = call(_llmc.head_linear.default, (_channels(graph, q, *own), up))
        query = call(aten.cat.default, ([_channels(graph, q, *rest), absorbed], 2))
        latents = call(aten.unsqueeze.default, (latent, 1))
        scoring = [arguments[name] for name in ("scale", "window", "softcap", "sinks", "slopes", "chunk")]
        of_tokens = {name: arguments[name] for name in ("bias", "chosen", "keeps") if arguments[name] is not None}
        attended = call(_ATTENTION, (query, site.shared, latents, *scoring, True), of_tokens)
        output = call(_llmc.head_linear.default, (attended, down))
    node.replace_all_uses_with(output)
    graph.graph.erase_node(node)


def _channels(graph: ModelGraph, q: fx.Node, start: int, end: int) -> fx.Node:
    """Channels start to end of each query: an operand of their concatenation, or a slice of them."""
    if q.target is aten.cat.default and call_arguments(q)["dim"] % 3 == 2:
        at = 0
        part: fx.Node
        for part in call_arguments(q)["tensors"]:
            size = int(part.meta["val"].shape[2])
            if (at, at + size) == (start, end):
                return part
            at += size
    return graph.graph.call_function(aten.slice.Tensor, (q, 2, start, end))


def _rows(numbers: Recipe, span: _PerHead, dtype: torch.dtype) -> Recipe:
    """Return the recipe of each head's rows of a weight [heads, channels, latent]."""
    rows = Derived(aten.slice.Tensor, (numbers, 1, span.start, span.end))
    return Derived(aten._to_copy.default, (rows,), (("dtype", dtype),))


def _recipe(graph: ModelGraph, weight: fx.Node) -> Recipe:
    """The recipe of a weight, or of the numbers of stored codes. Raises Refused for a tensor computed in the step."""
    if weight.name in graph.weights:
        return graph.weights[weight.name]
    record = record_of(weight)
    if record is None or record.part is not Part.STORAGE:
        raise Refused(f"{weight.name} is computed in the step, not a weight", weight)
    arguments = call_arguments(weight).values()
    return Derived(
        record.overload,
        tuple(_recipe(graph, argument) if isinstance(argument, fx.Node) else argument for argument in arguments),
    )


def _example(latent: Any, shared: Any, q: Any, weight: Any) -> Any:
    kv = aten.reshape.default(_llmc.linear.default(latent, weight), [-1, 2, 3])
    keys, values = aten.slice.Tensor(kv, 2, 0, 2), aten.slice.Tensor(kv, 2, 2, 3)
    key = aten.cat.default([keys, aten.expand.default(shared, [-1, 2, -1])], 2)
    return _ATTENTION(q, key, values, 0.5)


absorb_mla = GraphPass(
    "absorb_mla",
    run,
    Numerics.REORDER,
    examples=(
        Example(
            _example,
            {"latent": ("T", 2), "shared": ("T", 1, 1), "q": ("T", 2, 3), "weight": (6, 2)},
            frozenset({"weight"}),
        ),
    ),
)
