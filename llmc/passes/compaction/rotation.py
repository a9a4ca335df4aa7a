"""How the queries and keys of a layer were rotated by their positions, for ops that turn keys back."""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments

_llmc, _aten = torch.ops.llmc, torch.ops.aten
# Behind these, a value depends on positions as any hidden state does, or only on their number.
_ENDS = (
    *(_llmc.attention.default, _llmc.paged_attention.default),
    *(_llmc.embedding.default, _aten.embedding.default, _aten.full_like.default),
)


@dataclass(frozen=True)
class Rotation:
    """The rotation of a layer's queries or keys.

    Args:
        inv_freq: The weight with its frequencies; None for keys that are not rotated.
        interleaved: The order of pairs, as for llmc::rope.
        is_spread: Whether llmc::rotate_heads follows, as formats of codes ask for.
        scale: The factor of cos and sin, as for llmc::rope_angles.
    """

    inv_freq: fx.Node | None
    interleaved: bool = False
    is_spread: bool = False
    scale: float = 1.0


def rope_of(node: fx.Node) -> fx.Node:
    """The op in front of rotate_heads, if that spreads channels: llmc::rope, where positions rotate queries or keys."""
    return call_arguments(node)["x"] if node.target is _llmc.rotate_heads.default else node


def rotation_of(rotated: fx.Node, name: str = "keys") -> Rotation | str:
    """Return the rotation of queries or keys, by their name, or why they cannot be turned back, as in
    Placement.problem."""
    keys = rope_of(rotated)
    is_spread = keys is not rotated
    if keys.target is not _llmc.rope.default:
        if not _has_angles(keys):
            return Rotation(None, is_spread=is_spread)
        return f"{name} that come from {keys.target}, and not from llmc::rope alone, so they cannot be turned back"
    given = call_arguments(keys)
    angles = {given[part].args[0] for part in ("cos", "sin") if given[part].target is operator.getitem}
    found = next(iter(angles)) if len(angles) == 1 else None
    if found is None or found.target is not _llmc.rope_angles.default:
        return "angles that do not come from llmc::rope_angles"
    angles_of = call_arguments(found)
    inv_freq: fx.Node = angles_of["inv_freq"]
    if inv_freq.op != "placeholder":
        return "frequencies that are computed in each step"
    return Rotation(inv_freq, given["interleaved"], is_spread, angles_of["scale"])


def _has_angles(keys: fx.Node) -> bool:
    """Whether positions have a part in keys, other than through the hidden states that they are made of."""
    seen, ahead = set[fx.Node](), [keys]
    while ahead:
        node = ahead.pop()
        if node.target in _ENDS or node in seen:
            continue
        if node.name == "positions":
            return True
        seen.add(node)
        ahead += node.all_input_nodes
    return False
