"""Remove the layers of a model that change its hidden states least, for the option `prune`.

    s[i + 1] = layer(s[i]);  s[i + 2] = layer(s[i + 1])  ->  s[i + 2] = layer(s[i])
Layers are found by structure: all that lies between the hidden states before and after an attention
(speculative/residual_stream.py). Each counts by its block influence on calibration text, 1 - cos(s[i], s[i + 1]) on
average over tokens, in the model as it came. Caches of layers that go are not made. One rewrite for each layer.
Must have: a layer whose only value read elsewhere is its output state; one layer has to remain.
Numerics: lossy. Source: Men et al. 2024, "ShortGPT: layers in large language models are more redundant than you
expect".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import torch
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.pruning import Pruning
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.weights import stored_names
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_value
from llmc.passes.speculative.residual_stream import attentions, hidden_states


@dataclass(frozen=True)
class _Layer:
    """All between two hidden states."""

    number: int
    before: fx.Node
    after: fx.Node
    weights: tuple[fx.Node, ...]
    modules: tuple[str, ...]

    @property
    def module(self) -> str:
        """The prefix of its weights' names."""
        words = zip(*(module.split(".") for module in self.modules), strict=False)
        return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, words))


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Choose all of them at once, then remove them one at a time, from the last to the first."""
    pruning = options.pruning
    if pruning.layers == 0:
        return
    count = len(attentions(graph))
    states = hidden_states(graph) if count else []
    candidates = [_layer(graph, number, *pair) for number, pair in enumerate(pairwise(states))]
    layers = [
        candidate
        for candidate in candidates
        if isinstance(candidate, _Layer) and not pruning.keeps_layer(candidate.modules)
    ]
    refusals = [
        candidate if isinstance(candidate, Refusal) else _asked(candidate, pruning)
        for candidate in candidates
        if candidate not in layers
    ]
    for refusal in refusals:
        log.refuse(refusal)
    _check_count(pruning, count, len(layers), refusals)
    measured = _influences(Stream(graph, data.source, calibration_sequences(graph, options, data)), layers)
    order = sorted(layers, key=lambda layer: measured[layer.number][0])[: pruning.layers]
    for layer in sorted(order, key=lambda layer: -layer.number):
        influence, added = measured[layer.number]
        name = layer.module or str(layer.number)
        log.step(f"layer {layer.number} of {count}, {name}: block influence {influence:.3f}", layer.after)
        parameters = sum(math.prod(node.meta["val"].shape) for node in layer.weights)
        layer.after.replace_all_uses_with(layer.before)
        part = PrunedPart(name, "layer", (layer.number,), count, added, parameters, 0, layer.modules)
        graph.pruned = (*graph.pruned, part)


drop_layers = WeightPass("drop_layers", run, Numerics.LOSSY, budget=3.0)


def _layer(graph: ModelGraph, number: int, before: fx.Node | Refusal, after: fx.Node | Refusal) -> _Layer | Refusal:
    if isinstance(before, Refusal):
        return before
    if isinstance(after, Refusal):
        return after
    if not same_value(before.meta["val"], after.meta["val"]):
        types = " and ".join(describe(node.meta["val"]) for node in (before, after))
        return Refusal(f"the states before and after layer {number} are {types}", after)
    inside = _between(before, after)
    for node in inside - {after}:
        for user in node.users:
            if user not in inside:
                return Refusal(f"{node.name} of layer {number} is read by {user.name} beyond it", node, users=(user,))
    names = {operand for node in inside for operand in node.all_input_nodes if operand.name in graph.weights}
    own = tuple(node for node in graph.weight_nodes() if node in names and inside.issuperset(node.users))
    stored = [name for node in own for name in stored_names(graph.weights[node.name])]
    modules = dict.fromkeys(name.removesuffix(".bias").removesuffix(".weight") for name in stored)
    return _Layer(number, before, after, own, tuple(modules))


def _between(before: fx.Node, after: fx.Node) -> set[fx.Node]:
    """The nodes that depend on one and lead to the other."""
    following, waiting = set[fx.Node](), [before]
    while waiting:
        new = set(waiting.pop().users) - following
        following |= new
        waiting += new
    leading, waiting = {after}, [after]
    while waiting:
        new = following.intersection(waiting.pop().all_input_nodes) - leading
        leading |= new
        waiting += new
    return leading


def _influences(stream: Stream, layers: Sequence[_Layer]) -> dict[int, tuple[float, float]]:
    """Return for each layer 1 - cos of the states around it, and the root mean square of their difference relative to
    that of the last."""
    states = dict.fromkeys(node for layer in layers for node in (layer.before, layer.after))
    behind = {node.next: node for node in states}
    rows: dict[fx.Node, Tensor] = {}
    influences: dict[int, tuple[float, float]] = {}
    ends = {layer.after: layer for layer in layers}
    for stop in stream.stops(list(behind)):
        state = behind[stop]
        rows[state] = stream.rows(state).float()
        layer = ends.get(state)
        if layer is not None:
            x, y = rows.pop(layer.before), rows[state]
            cosine = torch.cosine_similarity(x, y, dim=-1).mean()
            influences[layer.number] = float(1 - cosine), float((y - x).norm() / y.norm())
    return influences


def _asked(layer: _Layer, pruning: Pruning) -> Refusal:
    rule = pruning.rule_for(layer.modules)
    pattern = "" if rule is None else f": {rule.pattern}=none"
    return Refusal(f"layer {layer.number}, {layer.module}, stays{pattern}", layer.after, is_asked=True)


def _check_count(pruning: Pruning, count: int, free: int, refusals: Sequence[Refusal]) -> None:
    most = min(free, count - 1)
    if pruning.layers > most:
        kept = f", but only {free} can go: {refusals[0].reason}" if refusals else ", and one must stay"
        raise OptionError(
            f"{pruning.layers} layers cannot be removed: the model has {count}{kept}",
            at=f"prune=layers={pruning.layers}",
            fix=f"at most layers={most}" if most > 0 else "leave layers out",
        )
