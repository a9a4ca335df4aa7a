"""Scale the channels that products read, and fold the inverse into their producers, before weights are rounded.

    rms_norm(x, w);  linear(·, u), …        ->  rms_norm(x, w / s);  linear(·, u · s), …
    gated_activation(g, linear(x, up)) …    ->  the rows of up / s
    attention(q, k, linear(x, v)) …         ->  the rows of v / s, alike for the heads that share a KV head
Only recipes of weights change. s is AWQ's or SmoothQuant's (channel_scales.py), from calibration text.
Must have: everything that reads the channels is a product that is to be quantized by the same method; what makes them
is used for nothing else. Numerics: reorder, since the function stays the same; scaled weights are kept in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.formats.schemes import Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_of_experts
from llmc.graph.refusal import Refused
from llmc.graph.weights import Constant, Derived
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.channel_scales import Tie, awq_scales, smoothing_scales
from llmc.passes.quantization.plan import Planned, asked, plan
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

_llmc, _aten = torch.ops.llmc, torch.ops.aten
_NORMS = frozenset({_llmc.rms_norm.default, _llmc.layer_norm.default})
_LINEAR = _llmc.linear.default
_METHODS = ("awq", "smoothquant")
# Tokens that AWQ's search multiplies, twenty times with every weight.
_SEARCHED_ROWS = 256


@dataclass(frozen=True)
class Fold:
    """Where the inverse scales go: into weights of `maker`, named by argument, along their first axis.

    tie: makes channels equal that have the same maker. reduce: all channels' scales → one for each row of the weights.
    """

    maker: fx.Node
    names: tuple[str, ...]
    tie: Tie
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """The products that read one tensor of channels, with their plans."""

    x: fx.Node
    products: tuple[fx.Node, ...]
    plans: tuple[Planned, ...]


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Find the scales of every group on one run over the calibration text, then fold them."""
    planned = plan(graph, asked(options, data))
    groups = _groups(
        [p for p in planned if p.scheme is not None and p.scheme.method in _METHODS and not _is_experts(p)]
    )
    folds: dict[fx.Node, Fold] = {}
    for group in groups:
        with log.refusing():
            folds[group.products[0]] = _fold(graph, group)
    if not folds:
        return
    stream = Stream(graph, data.source, calibration_sequences(graph, options, data))
    folded: list[tuple[Group, Fold, Tensor]] = []
    at = {group.products[0]: group for group in groups if group.products[0] in folds}
    for node in data.told("scale", stream.stops(list(at)), len(at)):
        with log.refusing():
            folded.append((at[node], folds[node], _scales(at[node], folds[node], stream)))
    quantized = {weight for weight_plan in planned if weight_plan.scheme is not None for weight in weight_plan.weights}
    # Only now, since the stream ran on unscaled weights.
    for group, fold, scales in folded:
        log.step(f"{group.x.name} for {', '.join(p.module for p in group.plans)}", fold.maker, *group.products)
        _apply(graph, group, fold, scales, quantized)


scale_channels = WeightPass(
    "scale_channels",
    run,
    Numerics.REORDER,
    unproved="its scales are read off the data of weights, which are symbols here",
)


def _is_experts(planned: Planned) -> bool:
    """Whether it is a weight of experts, whose input channels are not scaled: AWQ fits scales per expert and folds
    none."""
    return any(map(is_of_experts, planned.products))


def _groups(planned: list[Planned]) -> list[Group]:
    readers: dict[fx.Node, list[tuple[fx.Node, Planned]]] = {}
    for weight_plan in planned:
        for product in weight_plan.products:
            readers.setdefault(call_arguments(product)["x"], []).append((product, weight_plan))
    return [Group(x, tuple(n for n, _ in members), tuple(p for _, p in members)) for x, members in readers.items()]


def _fold(graph: ModelGraph, group: Group) -> Fold:
    schemes = {(p.scheme.method, p.scheme.alpha) for p in group.plans if p.scheme is not None}
    if len(schemes) > 1:
        raise Refused(f"{group.x.name} is read by products with different methods: {sorted(schemes)}", group.x)
    others = [user.name for user in group.x.users if user not in group.products]
    if others:
        raise Refused(f"{group.x.name} is also read by {', '.join(others)}, which is not scaled", group.x)
    for weight_plan in group.plans:
        if len(weight_plan.readers) > 1:
            raise Refused(f"{weight_plan.module} is also read by {weight_plan.readers[1].name}", group.x)
    fold = _maker(group.x)
    for name in fold.names:
        weight = call_arguments(fold.maker)[name]
        if weight.name not in graph.weights:
            raise Refused(f"{name} of {fold.maker.name} is {weight.name}, which is computed in the step", fold.maker)
        if len(weight.users) > 1:
            raise Refused(f"{weight.name} is used by {len(weight.users)} nodes", fold.maker)
    return fold


def _maker(x: fx.Node) -> Fold:
    if x.target in _NORMS:
        names = _present(x, ("weight", "bias"))
        if names[:1] != ("weight",):
            raise Refused(f"{x.name} has no weight", x)
        return Fold(x, names, _untied, _same)
    if x.target is _llmc.gated_activation.default:
        up = call_arguments(x)["up"]
        return _row_fold(up, x, _untied, _same)
    if x.target is _aten.reshape.default and x.all_input_nodes[0].target is _llmc.attention.default:
        return _attention_fold(x.all_input_nodes[0])
    raise Refused(f"{x.name} is a {x.target}, which takes no scales", x)


def _attention_fold(attention: fx.Node) -> Fold:
    """Values pass attention as they are, so that they can be scaled where they are made."""
    v = call_arguments(attention)["v"]
    heads, kv_heads, dim = attention.meta["val"].shape[1], v.meta["val"].shape[1], v.meta["val"].shape[2]
    if len(attention.users) > 1 or v.target is not _aten.reshape.default or len(v.users) > 1:
        raise Refused(f"the values {v.name} of {attention.name} are not those of one product", attention)

    def tie(values: Tensor, reduction: Callable[[Tensor], Tensor]) -> Tensor:
        shared = values.reshape(kv_heads, heads // kv_heads, dim)
        return reduction(shared).expand_as(shared).reshape(-1)

    def reduce(scales: Tensor) -> Tensor:
        return scales.reshape(kv_heads, heads // kv_heads, dim)[:, 0].reshape(-1)

    return _row_fold(v.all_input_nodes[0], v, tie, reduce)


def _row_fold(linear: fx.Node, user: fx.Node, tie: Tie, reduce: Callable[[Tensor], Tensor]) -> Fold:
    if linear.target is not _LINEAR:
        raise Refused(f"{linear.name} is a {linear.target}, not a product", user)
    if len(linear.users) > 1:
        raise Refused(f"{linear.name} has {len(linear.users)} readers", user)
    return Fold(linear, _present(linear, ("weight", "bias")), tie, reduce)


def _present(node: fx.Node, names: tuple[str, ...]) -> tuple[str, ...]:
    arguments = call_arguments(node)
    return tuple(name for name in names if arguments.get(name) is not None)


def _untied(values: Tensor, reduction: Callable[[Tensor], Tensor]) -> Tensor:
    return values


def _same(scales: Tensor) -> Tensor:
    return scales


def _scales(group: Group, fold: Fold, stream: Stream) -> Tensor:
    schemes: list[Scheme] = [weight_plan.scheme for weight_plan in group.plans if weight_plan.scheme is not None]
    weights = [stream.weight(weight_plan.weights[0]) for weight_plan in group.plans]
    if schemes[0].method == "smoothquant":
        return smoothing_scales(list(stream.parts(group.x)), weights, schemes[0].alpha, fold.tie)
    scales, share = awq_scales(stream.rows(group.x, _SEARCHED_ROWS), weights, schemes, fold.tie)
    if share >= 1.0:
        raise Refused(f"no scales of {group.x.name} make the products' error smaller", group.x)
    return scales


def _apply(graph: ModelGraph, group: Group, fold: Fold, scales: Tensor, quantized: set[fx.Node]) -> None:
    for weight_plan in group.plans:
        _scale(graph, weight_plan.weights[0], scales, keeps_dtype=False)
    inverse = 1.0 / fold.reduce(scales)
    for name in fold.names:
        weight = call_arguments(fold.maker)[name]
        column = inverse if weight.meta["val"].dim() == 1 else inverse[:, None]
        is_row_weight = fold.maker.target is _LINEAR and name == "weight"
        _scale(graph, weight, column, keeps_dtype=is_row_weight and weight not in quantized)


def _scale(graph: ModelGraph, weight: fx.Node, factor: Tensor, *, keeps_dtype: bool) -> None:
    """Multiply a weight in fp32: rounding the product to bf16 would lose a part of the gain."""
    recipe: Any = graph.weights[weight.name]
    dtype = weight.meta["val"].dtype
    wide = Derived(_aten._to_copy.default, (recipe,), (("dtype", torch.float32),))
    scaled = Derived(_aten.mul.Tensor, (wide, Constant(factor)))
    if keeps_dtype:
        graph.weights[weight.name] = Derived(_aten._to_copy.default, (scaled,), (("dtype", dtype),))
        return
    graph.weights[weight.name] = scaled
    weight.meta["val"] = weight.meta["val"].new_empty(weight.meta["val"].shape, dtype=torch.float32)
