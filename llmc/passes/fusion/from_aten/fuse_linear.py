"""Turn products with a weight into llmc.linear, and table lookups into llmc.embedding.

    aten.linear(x, weight, bias)       →  llmc.linear(x, weight, bias)
    aten.embedding(weight, ids)        →  llmc.embedding(ids, weight)
Must have: a matrix as weight, whose last axis is x's; a bias for each of its rows, or none; ids of one axis.
"""

from typing import Any

import torch

from llmc.graph.refusal import Refusal, Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.rewrite import Numerics, Rewrite

aten = torch.ops.aten


def aten_linear(x: Any, weight: Any, bias: Any) -> Any:
    """torch.nn.functional.linear."""
    return aten.linear.default(x, weight, bias)


def aten_embedding(weight: Any, ids: Any, padding: Any, scaled: Any, sparse: Any) -> Any:
    """torch.nn.functional.embedding; the options concern only gradients."""
    return aten.embedding.default(weight, ids, padding, scaled, sparse)


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    return torch.ops.llmc.linear.default(x, weight, bias)


def _embedding(weight: Any, ids: Any) -> Any:
    return torch.ops.llmc.embedding.default(ids, weight)


def _is_matrix(match: Match) -> None:
    weight = match.tensor("weight")
    if weight.dim() != 2:
        raise Refused(f"the weight is {list(weight.shape)}, expected a matrix", match.root)
    bias = None if match.bound["bias"] is None else match.tensor("bias").shape
    if bias is not None and bias != weight.shape[:1]:  # torch spreads one number over all channels
        raise Refused(f"the bias is {list(bias)}, expected {list(weight.shape[:1])}", match.root)


def _is_lookup(match: Match) -> Refusal | None:
    ids = match.tensor("ids")
    return None if ids.dim() == 1 else Refusal(f"the ids are {list(ids.shape)}, expected one axis", match.root)


fuse_linear = Rewrite("fuse_linear", (aten_linear,), _linear, _is_matrix, Numerics.REORDER, Stage.CAPTURED)
fuse_embedding = Rewrite(
    "fuse_embedding",
    (aten_embedding,),
    _embedding,
    _is_lookup,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=({"weight": (3, 2), "ids": torch.tensor([2, 0])},),
)
