"""Equal pieces that an axis is sliced into, as gates and what they open are: cut, each rank has a part of each."""

from dataclasses import dataclass

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments

aten = torch.ops.aten


@dataclass(frozen=True)
class Pieces:
    """Equal slices of an axis. of: the sliced node and the axis. count: number of pieces. in_turns: whether their
    elements lie in turns, not piece after piece."""

    of: tuple[fx.Node, int]
    count: int
    in_turns: bool


def pieces(node: fx.Node) -> Pieces | None:
    """The equal pieces from which a slice takes one; None for other slices, or if another node also reads the sliced
    tensor."""
    if node.target is not aten.slice.Tensor:
        return None
    parts = _pieces(node)
    if parts is None or not all(
        user.target is aten.slice.Tensor and _pieces(user) == parts for user in parts.of[0].users
    ):
        return None
    return parts


def resize_slice(node: fx.Node, length: int) -> None:
    """Resize the piece that a slice takes to `length` elements, after its axis was resized."""
    arguments = call_arguments(node)
    operand, dim, start, end, step = (arguments[name] for name in ("self", "dim", "start", "end", "step"))
    if step > 1:
        end = length * step
    else:
        start = start // (end - start) * length
        end = start + length
    node.args = (operand, dim, start, end, *node.args[4:])


def _pieces(node: fx.Node) -> Pieces | None:
    arguments = call_arguments(node)
    operand, start, step = arguments["self"], arguments["start"] or 0, arguments["step"]
    shape = operand.meta["val"].shape
    axis = arguments["dim"] % len(shape)
    size, length = shape[axis], node.meta["val"].shape[axis]
    if not (isinstance(size, int) and isinstance(length, int) and isinstance(start, int)):
        return None
    if step > 1:
        fits = size == length * step and 0 <= start < step
    else:
        fits = 0 < length < size and size % length == 0 and start % length == 0 and start >= 0
    return Pieces((operand, axis), size // length, step > 1) if fits else None
