"""Ops of `streaming`: move the latest rows up, and turn their keys back to positions within the cache."""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.step_inputs import step_input
from llmc.passes.compaction.placement import Layer, Placement
from llmc.program import Streaming

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class _Rotation:
    """The rotation of a layer's keys: the weight with its frequencies, and whether pairs are interleaved."""

    inv_freq: fx.Node
    interleaved: bool


def _rotation(layer: Layer) -> _Rotation | str:
    """The rotation of a layer's keys; or why they cannot be turned, as Placement.problem says it."""
    keys: fx.Node = call_arguments(layer.write)["k"]
    if keys.target is not _llmc.rope.default:
        return f"keys that come from {keys.target}, and not from llmc::rope alone, so they cannot be turned back"
    given = call_arguments(keys)
    angles = {given[name].args[0] for name in ("cos", "sin") if given[name].target is operator.getitem}
    found = next(iter(angles)) if len(angles) == 1 else None
    if found is None or found.target is not _llmc.rope_angles.default:
        return "angles that do not come from llmc::rope_angles"
    inv_freq: fx.Node = call_arguments(found)["inv_freq"]
    if inv_freq.op != "placeholder":
        return "frequencies that are computed in each step"
    return _Rotation(inv_freq, given["interleaved"])


def _problem(layer: Layer) -> str | None:
    rotation, graph = _rotation(layer), layer.graph
    if isinstance(rotation, str):
        return rotation
    if any(spec.group != layer.spec.group for spec in graph.caches):
        return "a cache by rows, but other layers keep positions, and positions are those within the cache"
    positions = step_input(graph, "positions")
    readers = () if positions is None else positions.users
    other = next((user for user in readers if user.target is not _llmc.rope_angles.default), None)
    return None if other is None else f"positions that {other.name} reads, and only rotations may"


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    policy, given, spec, rotation = layer.policy, layer.given, layer.spec, _rotation(layer)
    assert isinstance(policy, Streaming) and isinstance(rotation, _Rotation)
    pair = given["k_cache"], given["v_cache"]
    turned = (rotation.interleaved, policy.sinks, spec.head_dim, spec.value_dim, given["cache_format"])
    with layer.graph.graph.inserting_before(layer.write):
        layer.graph.graph.call_function(_llmc.turn_rows.default, (*pair, layer.compaction, rotation.inv_freq, *turned))


streaming = Placement(_problem, _place)
