"""Scale channels in a launch that reads each row once.

    mul(x, weight)  ->  layer_scale(x, weight)
Must have: x is a matrix, weight has a number for each of its channels.
"""

from __future__ import annotations

from typing import Any

import torch

from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.pattern import Weight
from llmc.passes.rewrite import Numerics, Rewrite


def scaled(x: Any, weight: Weight) -> Any:
    """CaiT's."""
    return torch.ops.aten.mul.Tensor(x, weight)


def replacement(x: Any, weight: Any) -> Any:
    """The op."""
    return torch.ops.llmc.layer_scale.default(x, weight)


def precondition(match: Match) -> None:
    """Refuse what is no matrix, and a weight that is not its channels'."""
    x, weight = match.tensor("x"), match.tensor("weight")
    if x.ndim != 2 or weight.shape != x.shape[1:] or weight.dtype is not x.dtype:
        raise Refused(f"it scales {list(x.shape)} by {list(weight.shape)}", match.root)


fuse_layer_scale = Rewrite(
    "fuse_layer_scale", (scaled,), replacement, precondition, numerics=Numerics.EXACT, stage=Stage.OPTIMIZED
)
