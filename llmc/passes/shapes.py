"""Questions about fake values: equal shapes, dims counted from the front, sizes that do not depend on the step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.graph.call_arguments import call_arguments

aten = torch.ops.aten


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node; None for a constant and for a node that is not one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def fake_of(node: Any) -> torch.Tensor:
    """The fake tensor of a node that is known to yield a single tensor, as most ops do."""
    value: torch.Tensor = node.meta["val"]
    return value


def shape_of(node: Any) -> tuple[Any, ...]:
    """The sizes of such a tensor: numbers, and symbols where they depend on the step."""
    shape: tuple[Any, ...] = node.meta["val"].shape
    return shape


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two shapes are equal for every token count."""
    return len(first) == len(second) and all(same_size(a, b) for a, b in zip(first, second, strict=True))


def same_size(first: Any, second: Any) -> bool:
    """Whether two sizes are equal for every token count."""
    return bool(statically_known_true(first == second))


def same_value(first: Any, second: Any) -> bool:
    """Whether two fake values are tensors of one shape and dtype, the same size, or tuples of such."""
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(same_value(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, int | SymInt) and isinstance(second, int | SymInt):
        return same_size(first, second)
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.dtype is second.dtype
        and same_shape(first.shape, second.shape)
    )


def is_one(size: Any) -> bool:
    """Whether a size is 1 whatever the step."""
    return not isinstance(size, SymInt) and size == 1


def front_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def dim_of(call: fx.Node, name: str = "dim") -> int:
    """The dim that an argument of a call names, counted from the front."""
    return int(call_arguments(call)[name]) % dim_count(call)


def dim_count(call: fx.Node) -> int:
    """Return the number of dims from which a `dim` argument of this call chooses: the rank of the result for unsqueeze
    and stack, otherwise the rank of the first tensor argument."""
    if call.target in (aten.unsqueeze.default, aten.stack.default):
        return int(call.meta["val"].dim())
    first = call.all_input_nodes[0].meta["val"]
    return max(int(first.dim()), 1)


def sizes_with_inferred(shape: Sequence[Any]) -> list[int] | None:
    """A shape as reshape takes it, its one symbolic size as -1; None if several are symbolic."""
    symbolic = sum(isinstance(s, SymInt) for s in shape)
    if symbolic > 1 or (symbolic and any(not isinstance(s, SymInt) and s == 0 for s in shape)):
        return None
    return [-1 if isinstance(s, SymInt) else int(s) for s in shape]
