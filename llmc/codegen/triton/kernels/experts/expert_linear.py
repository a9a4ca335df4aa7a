"""llmc::expert_linear: the pairs of tokens and slots sorted by expert, then one product with all experts' weights."""

from dataclasses import replace

import torch
import triton
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.storage import storage_for
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.experts.expert_tile import expert_code_tile_kernel, expert_tile_kernel
from llmc.codegen.triton.kernels.experts.sort_pairs import sort_launch
from llmc.codegen.triton.kernels.products.coded_product import code_pointers, group_constants, turn_channels
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.storages import STORAGES
from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal
from llmc.program import Layout, code_rows_layout
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_llmc = torch.ops.llmc
# A decode step's experts have a pair or two each and are bound by reading the weights, which more pairs would not make
# slower on an H100; a prefill's have dozens, and then read them again for each tile, from the cache.
_PAIRS = 32
_OPERANDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, channels] or [tokens, slots, channels] of a float dtype, as the result; weights in rows or codes."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    parts = unrounded_parts(node)
    if "x" in parts:
        rounded = f"x is rounded to {arguments_of(parts['x'])['format']}, and experts' kernels take it as it is"
        return Refusal(f"{rounded}: give experts a scheme for weights alone, such as *experts*=int4:g32", node)
    if "weight" in parts and parts["weight"].target is not _llmc.dequantize.default:
        return Refusal("no kernel finds one expert's rows among weights without their zeros", node)
    x, result = arguments_of(node)["x"].meta["val"].dtype, node.meta["val"].dtype
    if x is not result:
        return Refusal(f"the result is {result} but x is {x}; kernels know one type for both", node)
    return refuse_dtypes(node, "x") or refuse_ranks(node, x=(2, 3)) or storage.refusal(node, target)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """The one way: other tiles for other numbers of tokens would sum up in another order."""
    sort, sorted_pairs = sort_launch(call)
    (slots,), experts, count = call.shape("index"), call.plain("experts"), call.count("index")
    stored = call.within("weight")
    weight_rows, channels = call.shape("weight") if stored is None else stored.shape("codes")
    out, out_block = weight_rows // experts, 32 if call.dtype("x") is torch.float32 else 64
    given: dict[str, Argument] = {"bias_ptr": call.vector("bias"), **sorted_pairs, "tokens": count}
    constants: dict[str, Constant] = {
        "IN": channels,
        "OUT": out,
        "SLOTS": slots,
        "X_SLOTS": 1 if len(call.shape("x")) == 1 else slots,
        "EXPERTS": experts,
        "PAIR_BLOCK": _PAIRS,
        "OUT_BLOCK": out_block,
    }
    if stored is None:
        function = expert_tile_kernel
        given["weight_ptr"] = call.weight("weight", Layout.ROWS)
        constants["IN_BLOCK"] = min(64, max(16, triton.next_power_of_2(channels)))
    else:
        function = expert_code_tile_kernel
        given |= code_pointers(stored.code_rows())
        constants |= _of_codes(call, stored, channels, target)
    pairs = f"{count} * {slots}"
    grid = (str(triton.cdiv(out, out_block)), f"min({pairs}, cdiv({pairs}, {_PAIRS}) + {experts})")
    product = DeviceLaunch(function, named_arguments(function, call, **given), constants, grid)
    return (replace(sort, then=(product,)),)


def _of_codes(call: Call, stored: Call, channels: int, target: GpuTarget) -> dict[str, Constant]:
    format, groups = stored.plain("format"), group_constants(stored)
    most = 64 if target.backend == "hip" or call.dtype("x") is torch.float32 else 128
    turn = min(most, turn_channels(format, channels, groups["GROUPS"]) or most)
    return {
        "FORMAT": format,
        "ROW_BYTES": row_bytes(channels, code_rows_layout(format)),
        **groups,
        "OPERANDS": _OPERANDS[call.dtype("x")],
        "BYTE_BLOCK": turn // (1 if CODE_FORMATS[format].bits == 8 else 2),
    }


expert_linear = KernelTemplate(_llmc.expert_linear.default, supports, candidates)
