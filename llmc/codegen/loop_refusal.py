"""Why no loop can hold a node of the pointwise vocabulary with these arguments."""

from collections.abc import Sequence

import torch
from torch import fx

from llmc.graph.dtype_names import torch_name
from llmc.graph.pointwise import BITWISE, reduces
from llmc.graph.refusal import Refusal

_DTYPES = frozenset({torch.int32, torch.int64, torch.bool})


def loop_refusal(node: fx.Node, float_dtypes: frozenset[torch.dtype]) -> Refusal | None:
    """Why no loop can hold the node, or None. float_dtypes: those that the loop's language stores."""
    value = node.meta["val"]
    if value.dtype not in float_dtypes | _DTYPES:
        known = ", ".join(sorted(torch_name(d) for d in float_dtypes))
        return Refusal(f"its result is {value.dtype}; loops know {known}, integers and booleans", node)
    if node.target in BITWISE and value.dtype != torch.bool:
        return Refusal(f"it works on the bits of {value.dtype}; loops know it for booleans only", node)
    if not reduces(node):
        return None
    shape = node.all_input_nodes[0].meta["val"].shape
    rank = len(shape)
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    found = [axes] if isinstance(axes, int) else list(axes) if isinstance(axes, Sequence) else list(range(rank))
    if [a % rank for a in found if isinstance(a, int)] != [rank - 1]:
        return Refusal(f"it reduces axes {found} of {rank}; a loop reduces only the last one", node)
    if not isinstance(shape[-1], int):
        return Refusal("it reduces over the tokens", node)
    return None
