"""Matrix products and lookups on CPUs: what their functions are called, and with which arguments.

How a weight is stored is the table's in storages.py, how x arrives a node of its own; a product is what is done with
the sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.kernel_arguments import DTYPES
from llmc.codegen.cpp.storages import STORAGES
from llmc.codegen.storage import storage_for, storage_of
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import CpuTarget

_EMBEDDING = torch.ops.llmc.embedding.default
_LM_HEAD = torch.ops.llmc.lm_head.default


def linear(call: Call) -> dict[str, Argument]:
    """llmc::linear and llmc::lm_head."""
    return _product(call)


def fused_linear(call: Call) -> dict[str, Argument]:
    """llmc::fused_linear."""
    return _product(call, call.plain("activation"), residual=call.rows("residual"), scale=call.plain("scale"))


def gated_linear(call: Call) -> dict[str, Argument]:
    """llmc::gated_linear."""
    return _product(call, call.plain("activation"), gated=True)


def product_family(name: str) -> Callable[[Call], str]:
    """The functions of a product, for how its weight is stored."""
    return lambda call: storage_of(STORAGES, call).family + name


def element_types(call: Call) -> tuple[str, ...]:
    """Of x, or of what a lookup gives."""
    if call.op is _EMBEDDING:
        return (DTYPES[call.plain("dtype") or call.dtype("weight")],)
    x = call.within("x") or call
    return (DTYPES[x.dtype("x")],)


def embedding(call: Call) -> dict[str, Argument]:
    """llmc::embedding."""
    arguments: dict[str, Argument] = {
        "tokens": call.count("ids"),
        "channels": call.shape("weight")[1],
        "ids": call.vector("ids"),
        "y": call.result(),
    }
    return arguments | storage_of(STORAGES, call).lookup(call)[1]


def embedding_family(call: Call) -> str:
    """The functions of a lookup, for how the table is stored."""
    return storage_of(STORAGES, call).lookup(call)[0]


def _product(
    call: Call, activation: str = "identity", *, residual: Argument = None, scale: float = 1.0, gated: bool = False
) -> dict[str, Argument]:
    out, channels = call.shape("weight")
    x = call.within("x") or call
    return {
        "tokens": x.count("x"),
        "in": channels,
        "out": out // 2 if gated else out,
        "x": x.rows("x"),
        "bias": call.vector("bias"),
        "residual": residual,
        "y": call.result(),
        "activation": activation,
        "scale": scale,
    } | storage_of(STORAGES, call).product(call, gated)


def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
    """Why no kernel computes a product or lookup of its weight and x, or None."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    given, result = arguments_of(node), node.meta["val"].dtype
    is_lookup = "x" not in given
    x = node if is_lookup else x_of(node)
    what, dtype = "the result" if is_lookup else "x", x.meta["val"].dtype
    if dtype not in DTYPES:
        return Refusal(f"{what} is {dtype}; kernels know float32 and bfloat16", node)
    if result not in (dtype, torch.float32) or (result is not dtype and node.target is not _LM_HEAD):
        return Refusal(f"the result is {result} but x is {dtype}; kernels know one type for both", node)
    for name, tensor in {"ids": given["ids"]}.items() if is_lookup else {"x": x, "weight": given["weight"]}.items():
        rank = 1 if is_lookup else 2
        if tensor.meta["val"].dim() != rank:
            return Refusal(f"{name} has shape {list(tensor.meta['val'].shape)}; the kernel takes rank {rank}", node)
    return storage.refusal(node, unrounded_parts(node))
