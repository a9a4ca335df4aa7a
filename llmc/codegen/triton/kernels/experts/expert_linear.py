"""llmc::expert_linear: the pairs of tokens and slots sorted by expert, then one product with all experts' weights.

x as it is, or rounded to int8 or fp8 codes by a launch before (quantize_tokens.py), each row once for all its experts.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.storage import storage_for
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate, named_arguments, rows
from llmc.codegen.triton.kernels.experts.expert_tile import expert_code_tile_kernel, expert_tile_kernel
from llmc.codegen.triton.kernels.experts.sort_pairs import sort_launch
from llmc.codegen.triton.kernels.products.coded_product import code_pointers, group_constants, turn_channels
from llmc.codegen.triton.kernels.products.coded_ways import operand_type
from llmc.codegen.triton.kernels.products.format_facts import in_pairs
from llmc.codegen.triton.kernels.products.quantize_tokens import quantize_launch, token_groups
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.storages import STORAGES
from llmc.formats.code_format import TOKEN_GROUP
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal
from llmc.program import Layout, code_rows_layout
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_llmc = torch.ops.llmc
# A decode step's experts have a pair or two each and are bound by reading the weights, which more pairs would not make
# slower on an H100; a prefill's have dozens, and then read them again for each tile, from the cache.
_PAIRS = 32


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, channels] or [tokens, slots, channels] of a float dtype, as the result; weights in rows or codes."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    parts = unrounded_parts(node)
    if "weight" in parts and parts["weight"].target is not _llmc.dequantize.default:
        return Refusal("no kernel finds one expert's rows among weights without their zeros", node)
    x, result = x_of(node).meta["val"].dtype, node.meta["val"].dtype
    if x is not result:
        return Refusal(f"the result is {result} but x is {x}; kernels know one type for both", node)
    return refuse_dtypes(node, "x") or refuse_ranks(node, x=(2, 3)) or storage.refusal(node, target)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """The one way: other tiles for other numbers of tokens would sum up in another order."""
    sort, sorted_pairs = sort_launch(call)
    (slots,), experts, count = call.shape("index"), call.plain("experts"), call.count("index")
    stored, x = call.within("weight"), call.within("x") or call
    weight_rows, channels = call.shape("weight") if stored is None else stored.shape("codes")
    out, out_block = weight_rows // experts, 32 if _in_fp32(call) else 64
    constants: dict[str, Constant] = {
        "IN": channels,
        "OUT": out,
        "SLOTS": slots,
        "X_SLOTS": 1 if len(x.shape("x")) == 1 else slots,
        "EXPERTS": experts,
        "PAIR_BLOCK": _PAIRS,
        "OUT_BLOCK": out_block,
    }
    operands = _elements(call, channels) if stored is None else _codes(call, stored, channels, target)
    given: dict[str, Argument] = {"bias_ptr": call.vector("bias"), **sorted_pairs, "tokens": count}
    arguments = named_arguments(operands.function, call, **given, **operands.arguments)
    pairs = f"{count} * {slots}"
    grid = (str(triton.cdiv(out, out_block)), f"min({pairs}, cdiv({pairs}, {_PAIRS}) + {experts})")
    product = DeviceLaunch(operands.function, arguments, constants | operands.constants, grid)
    if operands.quantize is None:
        return (replace(sort, then=(product,)),)
    return (replace(operands.quantize, then=(sort, product)),)


@dataclass(frozen=True)
class _Operands:
    """The kernel for a W, and what it is given of W and x. quantize: rounds x to codes, if it is multiplied as such."""

    function: Any
    arguments: dict[str, Argument]
    constants: dict[str, Constant]
    quantize: DeviceLaunch | None = None


def _elements(call: Call, channels: int) -> _Operands:
    arguments = {**rows("x", call.rows("x")), "weight_ptr": call.weight("weight", Layout.ROWS)}
    in_block = min(64, max(16, triton.next_power_of_2(channels)))
    return _Operands(expert_tile_kernel, arguments, {"IN_BLOCK": in_block})


def _codes(call: Call, stored: Call, channels: int, target: GpuTarget) -> _Operands:
    arrived, format, groups = call.within("x"), stored.plain("format"), group_constants(stored)
    most = 64 if target.backend == "hip" or _in_fp32(call) else 128
    turn = min(most, turn_channels(format, channels, groups["GROUPS"]) or most)
    quantize, x_format, x_groups = None, "none", 1
    if arrived is None:
        x: dict[str, Argument] = {**rows("x", call.rows("x")), "x_scales_ptr": None}
    else:
        quantize, x = quantize_launch(arrived, by_row=True)
        x_format, x_groups = arrived.plain("format"), token_groups(arrived)
        turn = TOKEN_GROUP if x_groups > 1 else turn
    byte_block = turn // (2 if in_pairs(format) else 1)
    constants = {
        "FORMAT": format,
        "X_FORMAT": x_format,
        "ROW_BYTES": row_bytes(channels, code_rows_layout(format)),
        **groups,
        "X_GROUPS": x_groups,
        "OPERANDS": operand_type(x_format, call.dtype("x"), byte_block, target),
        "BYTE_BLOCK": byte_block,
    }
    return _Operands(expert_code_tile_kernel, {**x, **code_pointers(stored.code_rows())}, constants, quantize)


def _in_fp32(call: Call) -> bool:
    """Whether the matrix units have no type for the operands, and tiles keep them in registers."""
    return call.within("x") is None and call.dtype("x") is torch.float32


expert_linear = KernelTemplate(_llmc.expert_linear.default, supports, candidates)
