"""Tell whether a mask is causal, perhaps with a window, by looking at its values.

A mask is a few ops over positions and constants (tril of ones, comparisons of arange, a buffer cut to length); which
ones does not matter. It is computed for a short sequence and for one longer than any number that it is made with, so
that a window of any such width shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.passes.evaluation import constants_within, integers_within, value_at

_SHORT, _LONGEST = 5, 4096
# Additive masks hide with minus infinity or with a very negative number, whose exp is 0 in every dtype.
_HIDDEN = -1e4


@dataclass(frozen=True)
class CausalMask:
    """window: how many positions a query sees, itself included; None for all before it."""

    window: int | None


def read_mask(mask: fx.Node, graph: ModelGraph, *, true_hides: bool = False) -> CausalMask | Refusal:
    """The causal mask that a node computes: boolean (True where visible, or hidden), or added to the scores.

    Refusals give the query and key at which it is not causal, or what its values depend on.
    """
    longest = _length(mask, graph)
    if longest > _LONGEST:
        return Refusal(f"the mask is made with the number {longest - 2}, a window of which cannot be ruled out", mask)
    found: CausalMask | None = None
    for length in sorted({min(_SHORT, longest), longest}):
        value = value_at(mask, graph, torch.arange(length))
        if isinstance(value, Refusal):
            return Refusal(f"the mask is not known to be causal: {value.reason}", mask)
        visible = _visible(value, length, true_hides)
        if isinstance(visible, str):
            return Refusal(visible, mask)
        seen = _window(visible)
        if isinstance(seen, str):
            return Refusal(seen, mask)
        found = seen
    assert found is not None
    return found


def _length(mask: fx.Node, graph: ModelGraph) -> int:
    """A length at which every window shows that the mask can have, and that its buffers allow."""
    sides = [min(t.shape[-2:]) for t in constants_within(mask, graph) if t.dim() >= 2 and min(t.shape[-2:]) > 1]
    if sides:
        return min(sides)
    return max(2 * _SHORT, *(abs(i) + 2 for i in integers_within(mask)), 0)


def _visible(value: Tensor, length: int, true_hides: bool) -> Tensor | str:
    if value.numel() != length * length or value.shape[-1] != length:
        return f"the mask of {length} tokens has shape {list(value.shape)}, expected one [tokens, tokens] for all heads"
    square = value.reshape(length, length)
    if square.dtype is torch.bool:
        return ~square if true_hides else square
    strange = square[(square != 0) & (square > _HIDDEN)]
    if strange.numel():
        return f"the mask adds {strange[0].item()} to a score, expected 0 or less than {_HIDDEN}"
    return square == 0


def _window(visible: Tensor) -> CausalMask | str:
    length = visible.shape[0]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    width = int(visible[-1].sum())
    expected = (key <= query) & (key > query - width)
    wrong = (visible != expected).nonzero()
    if len(wrong):
        q, k = wrong[0].tolist()
        sees = "sees" if visible[q, k] else "does not see"
        return f"the mask is not causal: of {length} positions, query {q} {sees} key {k}"
    return CausalMask(None if width == length else width)
