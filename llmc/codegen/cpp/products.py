"""Matrix products and lookups on CPUs: what their functions are called, and with which arguments.

The table in storages.py defines how a weight is stored, and separate nodes round x; a product defines what is done with
the sums.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.kernel import DTYPES, Arguments, Kernel, by_name, no_more, refuse_dtypes
from llmc.codegen.cpp.panel import PANEL
from llmc.codegen.cpp.storages import STORAGES, dense_refusal
from llmc.codegen.storage import storage_for, storage_of
from llmc.graph.product_parts import is_of_experts, unrounded_parts, x_of
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.targets import CpuTarget

_LM_HEAD = torch.ops.llmc.lm_head.default
NO_SPARSE_EXPERTS = "no kernel finds one expert's rows among weights without their zeros"
MOST_EXPERTS = 1024  # kMostExperts in kernels/experts.h
# Dtypes of tables: a table may also hold ids.
_TABLES = DTYPES | dict.fromkeys((torch.int32, torch.int64), "I32")


def product(name: str, *, gated: bool = False, more: Callable[[Call], Arguments] = no_more) -> Kernel:
    """The functions of that name, for every storage. gated: the weight has gate's rows followed by up's. more: other
    fields, or with other values."""

    def arguments(call: Call) -> Arguments:
        out, channels = call.shape("weight")
        x = call.within("x") or call
        names = {argument.name for argument in call.op._schema.arguments}
        return (
            {
                "tokens": x.count("x"),
                "in": channels,
                "out": out // 2 if gated else out,
                "x": x.rows("x"),
                "bias": call.vector("bias"),
                "residual": call.rows("residual") if "residual" in names else None,
                "y": call.result(),
                "activation": call.plain("activation") if "activation" in names else "identity",
                "scale": call.plain("scale") if "scale" in names else 1.0,
            }
            | (_of_adapters(call) if "delta" in names and call.plain("delta") is not None else {})
            | storage_of(STORAGES, call).product(call, gated)
            | more(call)
        )

    return Kernel(
        family=lambda call: storage_of(STORAGES, call).family + name,
        element_types=lambda call: (DTYPES[(call.within("x") or call).dtype("x")],),
        arguments=arguments,
        refusal=refusal,
    )


def _of_adapters(call: Call) -> Arguments:
    return {"delta": call.rows("delta"), "adapters": call.vector("adapters")}


def sent(call: Call) -> Arguments:
    """Return the argument that names the experts whose rows of a weight each token is multiplied with."""
    experts, (slots,) = call.plain("experts"), call.shape("index")
    return {
        "out": call.shape("weight")[0] // experts,
        "index": call.vector("index"),
        "pairs": call.workspace("pairs", call.count("index"), slots, torch.int32).pointer,
        "slots": slots,
        "x_slots": 1 if len(call.shape("x")) == 1 else slots,
        "experts": experts,
    }


def of_heads() -> Kernel:
    """llmc::head_linear, whose heads are as experts that every token is sent to."""

    def of_panels(call: Call) -> Arguments:
        return {"slots": 1, "weight": call.weight("weight", Layout.PANELS)}

    def refused(node: fx.Node, target: CpuTarget) -> Refusal | None:
        return dense_refusal(node, {}) or refuse_dtypes(node, ("x", "weight"))

    kernel = by_name("head_linear", "x[tokens | experts in] weight[_ out _]", more=of_panels)
    return replace(kernel, refusal=refused)


def lookup() -> Kernel:
    """llmc::embedding, for every storage."""

    def arguments(call: Call) -> Arguments:
        return {
            "tokens": call.count("ids"),
            "channels": call.shape("weight")[1],
            "ids": call.vector("ids"),
            "y": call.result(),
        } | storage_of(STORAGES, call).lookup(call)[1]

    return Kernel(
        family=lambda call: storage_of(STORAGES, call).lookup(call)[0],
        element_types=lambda call: (_TABLES[call.plain("dtype") or call.dtype("weight")],),
        arguments=arguments,
        refusal=refusal,
    )


def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
    """Return why no kernel computes a product or lookup of its weight and x, or None."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    arguments, result = arguments_of(node), node.meta["val"].dtype
    is_lookup = "x" not in arguments
    x = node if is_lookup else x_of(node)
    operand, dtype = "the result" if is_lookup else "x", x.meta["val"].dtype
    if dtype not in (_TABLES if is_lookup else DTYPES):
        return Refusal(f"{operand} is {dtype}; kernels know float32 and bfloat16", node)
    if result not in (dtype, torch.float32) or (result is not dtype and node.target is not _LM_HEAD):
        return Refusal(f"the result is {result} but x is {dtype}; kernels know one type for both", node)
    for name, tensor in (
        {"ids": arguments["ids"]}.items() if is_lookup else {"x": x, "weight": arguments["weight"]}.items()
    ):
        ranks = (1,) if is_lookup else (2, 3) if name == "x" else (2,)
        if tensor.meta["val"].dim() not in ranks:
            return Refusal(f"{name} has shape {list(tensor.meta['val'].shape)}; the kernel takes rank {ranks}", node)
    if is_of_experts(node):
        experts, rows = arguments["experts"], arguments["weight"].meta["val"].shape[0] // arguments["experts"]
        if rows % PANEL:
            return Refusal(f"an expert has {rows} rows; the kernel knows multiples of {PANEL}", node)
        if experts > MOST_EXPERTS:
            return Refusal(f"there are {experts} experts; the kernel knows up to {MOST_EXPERTS}", node)
        if not storage.of_experts:
            return Refusal(NO_SPARSE_EXPERTS, node)
    return storage.refusal(node, unrounded_parts(node))
