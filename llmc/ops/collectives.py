"""Collectives between the ranks of a partitioned model: llmc::all_reduce, llmc::all_gather and llmc::hand_over.

Each rank runs the same graph on its own part of the weights; `across` is the result on all of them.
"""

import torch
from torch import Tensor

from llmc.errors import LoweringError
from llmc.ops.registry import FROM_CAPTURED, IN_NO_GRAPH, like, op, per_element


def alone(name: str) -> LoweringError:
    """Return the error for a collective that was called outside a partitioned graph."""
    return LoweringError(
        f"llmc::{name} was called on a single rank", fix="run all ranks of the graph: llmc.graph.execute does"
    )


def _sum(xs: list[Tensor], ranks: int) -> Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


@op(fake=like("x"), stages=FROM_CAPTURED, flops=per_element(1), rows=("x",), across=_sum)
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum of all ranks' x, in fp32 in the order of ranks, rounded once, on every rank. x: [..., channels]."""
    raise alone("all_reduce")


@op(fake=like("x"), stages=FROM_CAPTURED, flops=per_element(0))
def hand_over(x: Tensor, stage: int) -> Tensor:
    """Pass x on to `stage`, which runs on other ranks. Returns x: [tokens, ...].

    Rows are not declared independent, because the next stage gets those of all tokens.
    """
    return x.clone()


def joined(xs: list[Tensor], ends: Tensor, channels: int) -> Tensor:
    """The result of llmc::all_gather for the x of all ranks."""
    bounds = [0, *ends.tolist()]
    return torch.cat([x[..., : end - start] for x, start, end in zip(xs, bounds, bounds[1:], strict=False)], dim=-1)


@op(
    fake=lambda a: a.x.new_empty((*a.x.shape[:-1], a.channels)),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=("x",),
    across=joined,
)
def all_gather(x: Tensor, ends: Tensor, channels: int) -> Tensor:
    """Concatenate the channels of all ranks, on every rank.

    x: [..., width]; ends: [ranks], int32, where each rank's end in the result [..., channels]; what a rank has beyond
    its own is padding and left out.
    """
    raise alone("all_gather")


@op(
    fake=lambda a: a.x.new_empty([a.runs * a.length if i == a.axis else size for i, size in enumerate(a.x.shape)]),
    stages=IN_NO_GRAPH,
    flops=per_element(0),
)
def rank_part(x: Tensor, axis: int, start: int, stop: int, length: int, runs: int = 1) -> Tensor:
    """A rank's part of a weight: elements start to stop of an axis, padded with zeros to `length`, in each of `runs`
    equal runs of the axis."""
    if runs > 1:
        parts = x.unflatten(axis, (runs, -1))
        return rank_part(parts, axis + 1, start, stop, length).flatten(axis, axis + 1)
    own = x.narrow(axis, start, stop - start)
    missing = list(own.shape)
    missing[axis] = length - (stop - start)
    return torch.cat((own, own.new_zeros(missing)), dim=axis) if missing[axis] else own.contiguous()
