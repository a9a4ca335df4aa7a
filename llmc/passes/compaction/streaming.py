"""Ops of `streaming`: move the latest rows up, and turn their keys back to positions within the cache."""

import torch
from torch import fx

from llmc.graph.step_inputs import step_input
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.rotation import Rotation, rotation_of
from llmc.program import Streaming

_llmc = torch.ops.llmc


def _problem(layer: Layer) -> str | None:
    rotation, graph = rotation_of(layer.keys), layer.graph
    if isinstance(rotation, str):
        return rotation
    if rotation.inv_freq is None or rotation.is_spread:
        return f"keys that come from {layer.keys.target}, and not from llmc::rope alone, so they cannot be turned back"
    if any(spec.group != layer.spec.group for spec in graph.caches):
        return "a cache by rows, but other layers keep positions, and positions are those within the cache"
    positions = step_input(graph, "positions")
    readers = () if positions is None else positions.users
    other = next((user for user in readers if user.target is not _llmc.rope_angles.default), None)
    return None if other is None else f"positions that {other.name} reads, and only rotations may"


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    policy, given, spec, rotation = layer.policy, layer.given, layer.spec, rotation_of(layer.keys)
    assert isinstance(policy, Streaming) and isinstance(rotation, Rotation)
    pair = given["k_cache"], given["v_cache"]
    turned = (rotation.interleaved, policy.sinks, spec.head_dim, spec.value_dim, given["cache_format"])
    with layer.graph.graph.inserting_before(layer.write):
        layer.graph.graph.call_function(_llmc.turn_rows.default, (*pair, layer.compaction, rotation.inv_freq, *turned))


streaming = Placement(_problem, _place)
