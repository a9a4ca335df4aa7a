"""AWQ, SmoothQuant, Wanda and SparseGPT of a tiny Llama as published, with nothing shared, kept or run in parallel.

Each runs the whole canonical graph node by node in fp32, once per sequence, and again for each weight whose input
depends on weights changed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.product_parts import is_product
from llmc.graph.weights import evaluate
from tests.passes.sparsity.plain_sparsegpt import plain_sparsegpt

Weights = dict[str, Tensor]
HEADS, KV_HEADS = 4, 2
GROUP = 32
_LAYER = "model_layers_{}_{}_weight"


class PlainLlama:
    """The canonical graph of a Llama of two layers, with weights that change.

    Args:
        captured: the graph, and the source of its weights.
        sequences: calibration tokens, ids of a sequence each.
    """

    def __init__(self, captured: Captured, sequences: Sequence[Tensor]) -> None:
        self._graph, self._sequences = captured.graph, sequences
        nodes = captured.graph.weight_nodes()
        self.weights: Weights = {n.name: evaluate(captured.graph.weights[n.name], captured.source) for n in nodes}
        products = [node for node in captured.graph.graph.nodes if is_product(node)][:-1]
        self.products = {call_arguments(node)["weight"].name: node for node in products}

    def inputs(self, weight: str) -> Tensor:
        """What the product with a weight reads, [tokens, channels] of all sequences."""
        x = call_arguments(self.products[weight])["x"]
        return torch.cat([self._values(ids)[x] for ids in self._sequences])

    def _values(self, ids: Tensor) -> Mapping[fx.Node, Tensor]:
        values: dict[fx.Node, Any] = {}
        given = self.weights | {"input_ids": ids, "positions": torch.arange(len(ids))}
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = given[node.name]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        return values


def plain_zeros(llama: PlainLlama, method: str, pattern: tuple[int, int] | None) -> Weights:
    """Weights of which half is zero, each chosen on inputs that the sparse weights before it made."""
    for name in llama.products:
        x, weight = llama.inputs(name), llama.weights[name]
        sparse = _wanda(weight, x, pattern) if method == "wanda" else plain_sparsegpt(weight, x, 0.5, pattern)
        llama.weights[name] = sparse.float()
    return {name: llama.weights[name] for name in llama.products}


def plain_smoothquant(llama: PlainLlama) -> Weights:
    """Codes in int8 with a scale per row."""

    def scales(x: Tensor, weights: Sequence[Tensor], tie: Callable[[Tensor], Tensor]) -> Tensor:
        largest = tie(x.abs().amax(0))
        of_weights = tie(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
        return largest.sqrt() / of_weights.sqrt()

    _fold(llama, scales, lambda shared: shared.amax(1, keepdim=True))
    codes: Weights = {}
    for name in llama.products:
        weight = llama.weights[name]
        codes[name] = (weight / (weight.abs().amax(1, keepdim=True) / 127)).round().clamp(-127, 127)
    return codes


def plain_awq(llama: PlainLlama) -> Weights:
    """Codes in int4 with zeros, in groups of 32 columns whose scales are fitted to what their inputs are."""

    def scales(x: Tensor, weights: Sequence[Tensor], tie: Callable[[Tensor], Tensor]) -> Tensor:
        some = x[torch.linspace(0, len(x) - 1, 256).long()]
        mean, errors = tie(some.abs().mean(0)), list[float]()
        tried = [mean.pow(step / 20) for step in range(20)]
        tried = [activity / (activity.max() * activity.min()).sqrt() for activity in tried]
        for candidate in tried:
            lost = [
                _decoded(weight * candidate, *_range(weight * candidate)) / candidate - weight for weight in weights
            ]
            errors.append(sum(float((some @ loss.t()).square().sum()) for loss in lost))
        return tried[errors.index(min(errors))]

    _fold(llama, scales, lambda shared: shared.mean(1, keepdim=True))
    codes: Weights = {}
    for name in llama.products:
        weight, squares = llama.weights[name], llama.inputs(name).square().mean(0)
        scale, zero = _fitted(weight, squares)
        codes[name] = _codes(weight, scale, zero)
        llama.weights[name] = _decoded(weight, scale, zero)
    return codes


def _fold(
    llama: PlainLlama,
    scales: Callable[[Tensor, Sequence[Tensor], Callable[[Tensor], Tensor]], Tensor],
    reduction: Callable[[Tensor], Tensor],
) -> None:
    """Scale the columns that products read, and the rows or the norm that make these channels by the inverse; the
    scales of all are found before."""
    folds: list[tuple[str, tuple[str, ...], Tensor]] = []
    for maker, readers in _groups():
        x, weights = llama.inputs(readers[0]), [llama.weights[name] for name in readers]
        folds.append((maker, readers, scales(x, weights, _tie(reduction) if "v_proj" in maker else lambda each: each)))
    for maker, readers, scale in folds:
        for name in readers:
            llama.weights[name] = llama.weights[name] * scale
        if "v_proj" in maker:  # Queries that share a head of values have the same scales.
            scale = scale.view(KV_HEADS, HEADS // KV_HEADS, -1)[:, 0].reshape(-1)
        weight = llama.weights[maker]
        llama.weights[maker] = weight * (1.0 / scale if weight.dim() == 1 else (1.0 / scale)[:, None])


def _groups() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What makes channels, and the products that read them."""
    for layer in range(2):
        for maker, readers in (
            ("input_layernorm", ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj")),
            ("self_attn_v_proj", ("self_attn_o_proj",)),
            ("post_attention_layernorm", ("mlp_gate_proj", "mlp_up_proj")),
            ("mlp_up_proj", ("mlp_down_proj",)),
        ):
            yield _LAYER.format(layer, maker), tuple(_LAYER.format(layer, reader) for reader in readers)


def _tie(reduction: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same number for all channels that one row of the values makes."""

    def tied(each: Tensor) -> Tensor:
        shared = each.view(KV_HEADS, HEADS // KV_HEADS, -1)
        return reduction(shared).expand_as(shared).reshape(-1)

    return tied


def _range(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero of each element, which cover its group."""
    groups = weight.unflatten(1, (-1, GROUP))
    return _covering(groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), groups)


def _covering(low: Tensor, high: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-8 - (low / scale).round()).clamp(-8, 7)
    return scale.expand_as(groups).flatten(1), zero.expand_as(groups).flatten(1)


def _fitted(weight: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Of seventeen ranges, the one with the least error of each group, weighted by the squares of inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best, best_range = torch.full_like(weight, torch.inf), _range(weight)
    for step in range(17):
        share = 1.0 - step / 40
        tried = _covering(low * share, high * share, groups)
        lost = (_decoded(weight, *tried) - weight).square() * squares
        error = lost.unflatten(1, (-1, GROUP)).sum(-1, keepdim=True).expand_as(groups).flatten(1)
        better = error < best
        best = torch.where(better, error, best)
        best_range = torch.where(better, tried[0], best_range[0]), torch.where(better, tried[1], best_range[1])
    return best_range


def _codes(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((weight / scale).round() + zero).clamp(-8, 7)


def _decoded(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (_codes(weight, scale, zero) - zero) * scale


def _wanda(weight: Tensor, x: Tensor, pattern: tuple[int, int] | None) -> Tensor:
    """A weight without the elements of each row, or run of columns, with the least |w|·‖x‖."""
    worth = weight.abs() * x.square().sum(0).sqrt()
    removed = weight.shape[1] // 2
    if pattern is not None:
        worth, removed = worth.unflatten(1, (-1, pattern[1])), pattern[1] - pattern[0]
    zeros = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.argsort(-1)[..., :removed], True)
    return weight.masked_fill(zeros.view_as(weight), 0.0)
