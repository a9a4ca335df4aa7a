"""The record by which the pass `place_compaction` places the ops of a KV compression policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import CacheSpec, ModelGraph
from llmc.graph.step_inputs import step_input
from llmc.program import COMPACTION, CachePolicy

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Layer:
    """An attention whose cache has the policy. node: its paged_attention. longest: tokens of the longest sequence."""

    graph: ModelGraph
    spec: CacheSpec
    node: fx.Node
    policy: CachePolicy
    longest: int
    block_size: int

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the attention by name."""
        return call_arguments(self.node)

    @property
    def write(self) -> fx.Node:
        """The op that writes the layer's new keys and values."""
        keys: fx.Node = self.given["k_cache"]
        return next(user for user in keys.users if user.target is _llmc.kv_write.default)

    @property
    def keys(self) -> fx.Node:
        """The layer's new keys."""
        found: fx.Node = call_arguments(self.write)["k"]
        return found

    @property
    def compaction(self) -> fx.Node:
        """The step input that says which rows move."""
        found = step_input(self.graph, COMPACTION)
        assert found is not None
        return found


@dataclass(frozen=True)
class Placement:
    """The ops of a policy.

    Args:
        problem: why they cannot serve a layer, or None; it follows "layer N has".
        place: adds them to the graph, in front of the layer's `kv_write`, given the layer's further caches.
        add_caches: adds further caches for a layer.
        place_joined: for policies whose layers choose rows together, adds the ops of all layers at once, in the place
            of `place`.
    """

    problem: Callable[[Layer], str | None]
    place: Callable[[Layer, tuple[fx.Node, ...]], None]
    add_caches: Callable[[Layer], tuple[fx.Node, ...]] = lambda layer: ()
    place_joined: Callable[[Sequence[Layer]], None] | None = None
