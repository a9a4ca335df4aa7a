"""Tell whether a mask is causal, perhaps with a window, chunks or a slope for each head, by looking at its values.

A mask is a few ops over positions and constants (tril of ones, comparisons of arange, a buffer cut to length); which
ones does not matter. It is computed for a short sequence and for one longer than any number that it is made with, so
that a window of any such width shows. Source of the slopes: Press et al. 2022, "Train Short, Test Long" (ALiBi).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.passes.evaluation import constants_within, integers_within, value_at

# Additive masks hide with minus infinity or with a very negative number, whose exp is 0 in every dtype: -1e4, which is
# this in bfloat16.
HIDDEN = -9984.0

_SHORT, _LONGEST = 5, 4096


@dataclass(frozen=True)
class CausalMask:
    """A causal mask that llmc.attention can express. window: how many positions a query sees, itself included; None for
    all before it. chunk: a query sees those of the `chunk` positions that its own lies among; None if positions are in
    no chunks. slopes: what a position farther back takes off a score, one number a head; None for nothing."""

    window: int | None
    chunk: int | None = None
    slopes: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Head:
    """The mask of one head."""

    window: int | None
    chunk: int | None
    slope: float


def read_mask(mask: fx.Node, graph: ModelGraph) -> CausalMask:
    """The causal mask that a node computes: boolean (True where visible), or added to the scores.

    Raises Refused, with the query and key at which it is not causal, or what its values depend on.
    """
    causal: CausalMask | None = None
    for length in lengths_to_look_at((mask,), graph):
        value = mask_value(mask, graph, length)
        if value.dtype is torch.bool:
            value = torch.zeros(value.shape).masked_fill(~value, float("-inf"))
        causal = mask_of_heads((head_of(value, head) for head in range(head_count(value))), length, mask)
    assert causal is not None
    return causal


def mask_value(node: fx.Node, graph: ModelGraph, length: int) -> Tensor:
    """Evaluate a mask for `length` tokens."""
    try:
        return value_at(node, graph, torch.arange(length))
    except Refused as refused:
        raise Refused(f"the mask is not known to be causal: {refused.refusal.reason}", node) from None


def lengths_to_look_at(masks: Sequence[fx.Node], graph: ModelGraph) -> list[int]:
    """A short length, and one at which every window shows that masks made of these can have, if buffers allow it."""
    longest = max(2 * _SHORT, *(abs(i) + 2 for mask in masks for i in integers_within(mask)), 0)
    sides = [
        min(t.shape[-2:])
        for mask in masks
        for t in constants_within(mask, graph)
        if t.dim() >= 2 and min(t.shape[-2:]) > 1
    ]
    if sides:
        longest = min(sides)
    elif graph.info.max_positions is not None:
        longest = min(longest, graph.info.max_positions)
    if longest > _LONGEST:
        number = longest - 2
        raise Refused(f"the mask depends on the number {number}, which may be a window", masks[0])
    return sorted({min(_SHORT, longest), longest})


def head_count(value: Tensor) -> int:
    """Heads that a mask [..., tokens, tokens] tells apart."""
    return int(value.shape[-3]) if value.dim() > 2 else 1


def head_of(value: Tensor, head: int) -> Tensor:
    """The part of a value [..., heads, tokens, tokens] that is broadcast to one head's scores."""
    while value.dim() > 2:
        value = value.select(-3, head if value.shape[-3] > 1 else 0)
    return value


def mask_of_heads(added: Iterable[Tensor], length: int, node: fx.Node) -> CausalMask:
    """The mask that these numbers are, which are added to each head's scores: [tokens, tokens], or broadcast to it."""
    heads: list[_Head] = []
    for value in added:
        if value.shape[-1] not in (1, length) or (value.dim() > 1 and value.shape[-2] not in (1, length)):
            raise Refused(f"the mask of {length} tokens has shape {list(value.shape)}, expected [tokens, tokens]", node)
        heads.append(_read_head(value.expand(length, length), node))
    first = heads[0]
    if any((head.window, head.chunk) != (first.window, first.chunk) for head in heads):
        raise Refused("the heads' masks differ in what they hide, expected one mask for all", node)
    has_slopes = any(head.slope for head in heads)
    return CausalMask(first.window, first.chunk, tuple(head.slope for head in heads) if has_slopes else None)


def _read_head(added: Tensor, node: fx.Node) -> _Head:
    if added.isnan().any():
        raise Refused("the mask has NaNs in it", node)
    visible = added > HIDDEN
    return _Head(*_seen(visible, node), _slope(added.float(), visible, node))


def _seen(visible: Tensor, node: fx.Node) -> tuple[int | None, int | None]:
    """The window and the chunk."""
    length = visible.shape[0]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    causal = key <= query
    if torch.equal(visible, causal):
        return None, None
    # The first query that does not see the first key gives the width of a window or chunk.
    width = int((~visible[:, 0]).nonzero()[0]) if not visible[:, 0].all() else length
    if torch.equal(visible, causal & (key // max(width, 1) == query // max(width, 1))):
        return None, width
    expected = causal & (key > query - width)
    wrong = (visible != expected).nonzero()
    if not len(wrong):
        return width, None
    q, k = wrong[0].tolist()
    sees = "sees" if visible[q, k] else "does not see"
    raise Refused(f"the mask is not causal: of {length} positions, query {q} {sees} key {k}", node)


def _slope(added: Tensor, visible: Tensor, node: fx.Node) -> float:
    """The slope of the values added at visible keys: slope · (key - query), plus any constant per query."""
    if not (added[visible] != 0).any():
        return 0.0
    length = added.shape[0]
    rise = added - added.diagonal()[:, None]
    # The farthest visible key of the last query: the smallest error where the numbers were rounded.
    far = int(visible[-1].nonzero()[0])
    slope = -float(rise[-1, far]) / max(length - 1 - far, 1)
    steps = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    largest = float(added[visible].abs().max())
    wrong = (visible & ((rise - slope * steps).abs() > largest * _ROUNDING)).nonzero()
    if not len(wrong):
        return slope
    q, k = wrong[0].tolist()
    number = f"{added[q, k].item():g}"
    raise Refused(
        f"the mask adds {number} to the score of query {q} and key {k}, expected a slope over positions", node
    )


# Biases that were computed in bfloat16 are off by this much of the largest.
_ROUNDING = 2.0**-7
