"""Sum and normalize in one pass over the row.

    s = add(x, r); rms_norm(s, w, eps)       ->  add_rms_norm(x, r, w, eps): the norm and s
    s = add(x, r); layer_norm(s, w, b, eps)  ->  add_layer_norm(x, r, w, b, eps): the norm and s
For the sums that fuse_linear_residual could not put into a product: where a norm comes after the product (Gemma 2,
OLMo 2), or tokens and positions are summed (GPT-2). Others may read s too; a second norm reads what comes out.
Must have: x and r are matrices of one shape and dtype; w and b are there before the sum is.
Numerics: exact, since s is rounded as before. Saves reading s once.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refused
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.rewrite import Numerics, Rewrite

_ADD = torch.ops.aten.add.Tensor
_llmc = torch.ops.llmc


def normed_by_rms(x: Any, residual: Any, weight: Any, eps: Any) -> Any:
    """Llama's norm."""
    total = _ADD(x, residual)
    return _llmc.rms_norm.default(total, weight, eps), total


def normed_by_layer(x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> Any:
    """GPT-2's norm."""
    total = _ADD(x, residual)
    return _llmc.layer_norm.default(total, weight, bias, eps), total


def replacement(x: Any, residual: Any, weight: Any, bias: Any, eps: Any, match: Match) -> Any:
    """The norm and the sum."""
    if match.root.target is _llmc.rms_norm.default:
        pair = _llmc.add_rms_norm.default(x, residual, weight, eps)
    else:
        pair = _llmc.add_layer_norm.default(x, residual, weight, bias, eps)
    return getitem(pair, 0), getitem(pair, 1)


def precondition(match: Match) -> None:
    """Refuse sums that broadcast, sums of numbers, and sums of tensors that are not matrices of tokens."""
    total, terms = match.outputs[1], (match.bound["x"], match.bound["residual"])
    if not all(isinstance(term, fx.Node) for term in terms):
        raise Refused(f"the sum of {terms[0]} and {terms[1]} adds a number", total)
    if render_type(terms[0]) != render_type(terms[1]):
        raise Refused(f"the sum is of {render_type(terms[0])} and {render_type(terms[1])}", total)
    if match.tensor("x").ndim != 2:
        raise Refused(f"the sum is {render_type(total)}, not a matrix of tokens", total)


fuse_add_norm = Rewrite(
    "fuse_add_norm",
    (normed_by_rms, normed_by_layer),
    replacement,
    precondition,
    numerics=Numerics.EXACT,
    stage=Stage.OPTIMIZED,
)
