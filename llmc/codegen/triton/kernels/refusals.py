"""Refusals that several kernels share, with the actual values in their messages: dtypes, ranks, rows."""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.graph.axes import ranks_of, tensor_axes
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The dtypes of tables of ids, which are int32 in memory.
IDS = (torch.int32, torch.int64)


def takes(axes: str, typed: Sequence[str] | None = None) -> Callable[[fx.Node, GpuTarget], Refusal | None]:
    """The check of a kernel that takes tensors of these axes, such as `x[tokens | groups? channels]` (graph/axes.py).
    typed: the tensors that must share a float dtype; the first of axes unless given."""
    ranks = {name: ranks_of(each) for name, each in tensor_axes(axes).items()}
    names = tuple(ranks)[:1] if typed is None else typed

    def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
        return refuse_dtypes(node, *names) or refuse_ranks(node, **ranks)

    return supports


def refuse_dtypes(node: fx.Node, *names: str) -> Refusal | None:
    """The tensors among those arguments must have one dtype: fp16, bf16 or fp32. Absent ones do not count."""
    found = {n: t.dtype for n, t in tensors_of(node).items() if n in names}
    for name, dtype in found.items():
        if dtype not in FLOATS:
            return Refusal(f"{name} is {dtype}; GPU kernels know float16, bfloat16 and float32", node)
    if len(set(found.values())) > 1:
        text = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
        return Refusal(f"{text}: the kernel takes one dtype for all of them", node)
    return None


def refuse_ranks(node: fx.Node, **ranks: tuple[int, ...]) -> Refusal | None:
    """Refuse a node if a named argument has none of the ranks."""
    tensors = tensors_of(node)
    for name, allowed in ranks.items():
        if name in tensors and tensors[name].dim() not in allowed:
            return Refusal(f"{name} has shape {list(tensors[name].shape)}; the kernel takes rank {allowed}", node)
    return None


def tensors_of(node: fx.Node) -> dict[str, torch.Tensor]:
    """The node's tensor arguments by schema name, as fake tensors; of a product x as its kernel reads it."""
    found = {name: a for name, a in arguments_of(node).items() if isinstance(a, fx.Node)}
    if "x" in unrounded_parts(node):
        found["x"] = x_of(node)
    return {name: argument.meta["val"] for name, argument in found.items()}
