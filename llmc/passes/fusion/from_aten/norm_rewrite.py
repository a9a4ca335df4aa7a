"""Shared parts of the rewrites of norms: preconditions, and an example of their shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.shapes import tensor_of
from llmc.passes.uses import DATA_MOVEMENT, is_weight, used_only_by

aten = torch.ops.aten


def norm_rewrite(name: str, replacement: Callable[..., Any], *patterns: Callable[..., Any]) -> Rewrite:
    """Make the rewrite of a norm's arithmetic into one op.

    patterns: return a norm of x over its last axis, and name weight, bias, shape and eps if they have them.

    eps: None if torch's op chooses it. The normalization of x may be shared with other norms, which become separate
    ops, as for keys and values of one projection (Gemma 4).
    """
    shapes = {"x": (2, 4), "weight": (4,), "bias": (4,), "shape": [4], "eps": 0.625}
    return Rewrite(
        name,
        patterns,
        replacement,
        _precondition,
        Numerics.REORDER,
        Stage.CAPTURED,
        shares_interior=True,
        examples=(shapes,),
    )


def _precondition(match: Match) -> None:
    for node in match.nodes:
        if node is not match.root and node.target not in DATA_MOVEMENT:
            used_only_by(node, {*match.nodes, *(user for user in node.users if _is_of_a_norm(user, match))})
    x, result = match.tensor("x"), match.root.meta["val"]
    eps, shape = match.bound.get("eps"), match.bound.get("shape")
    if result.dtype is not x.dtype:
        raise Refused(f"the norm returns {result.dtype} but its input is {x.dtype}", match.root)
    if not isinstance(eps, float | int) and not (eps is None and "shape" in match.bound):
        raise Refused(f"eps is {eps}, expected a constant", match.root)
    if shape is not None and len(shape) != 1:
        raise Refused(f"the norm is over the last {len(shape)} axes {list(shape)}, expected one", match.root)
    for name in ("weight", "bias"):
        bound = match.bound.get(name)
        tensor = tensor_of(bound)
        if bound is not None and (tensor is None or list(tensor.shape) != [x.shape[-1]]):
            seen = bound if tensor is None else list(tensor.shape)
            raise Refused(f"the {name} is {seen}, expected [{x.shape[-1]}]", match.root)


def _is_of_a_norm(user: fx.Node, match: Match) -> bool:
    """Whether it does what another norm does next: rounds as this one does, or multiplies with its weight."""
    if user.target is aten._to_copy.default:
        return bool(user.meta["val"].dtype is match.root.meta["val"].dtype)
    return user.target is aten.mul.Tensor and any(is_weight(argument, match.graph) for argument in user.args)
