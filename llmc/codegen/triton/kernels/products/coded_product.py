"""Products of weights that are codes: the arguments of the kernels for them, and what those do not read.

x as it is, or rounded to int8 or fp8 codes by a launch before (quantize_tokens.py), which may put it through an RMS
norm first. A few tokens are bound by reading the codes: code_narrow multiplies them, rounded ones as numbers, or
code_gemv if x is fp32 or code_narrow does not know the format. More tokens are multiplied on the matrix units
(code_tile).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx

from llmc.codegen.call import CODE_ROW_PARTS, Call, arguments_of, stored_weight
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import rows
from llmc.codegen.triton.kernels.products.expand_codes import expandable
from llmc.codegen.triton.kernels.products.format_facts import by_group, in_pairs
from llmc.codegen.triton.kernels.products.product import Codes, Epilogue, Product, product_of
from llmc.codegen.triton.kernels.products.quantize_tokens import as_numbers, quantize_launch, token_groups
from llmc.codegen.triton.kernels.refusals import FLOATS, tensors_of
from llmc.formats.code_format import CODE_FORMATS, RUN_UNIT, TOKEN_GROUP
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal
from llmc.program import code_rows_layout, step_row_bytes
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget

_LEAST_GROUP = 32
# For codes that share a byte with those of the channel 16 further on.
_LEAST_PAIRED_GROUP = 16
_DEQUANTIZE = torch.ops.llmc.dequantize.default


def coded_refusal(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Refuse groups that are neither a power of two of columns nor a row, and codes of x that no kernel supports."""
    weight = unrounded_parts(node)["weight"]
    tensors, format = tensors_of(weight), arguments_of(weight)["format"]
    refused = refuse_groups(node, tensors["scales"], int(tensors["codes"].shape[1]), format)
    return refused or refuse_arrival(node, target, has_zeros="zeros" in tensors)


def refuse_arrival(node: fx.Node, target: GpuTarget, *, has_zeros: bool) -> Refusal | None:
    """Refuse codes of x that no kernel multiplies with the weight's. has_zeros: whether the weight has zero points."""
    parts = unrounded_parts(node)
    stored = arguments_of(parts["weight"])
    arrived = arguments_of(parts["x"]) if "x" in parts else {"format": "none", "group": None}
    format, x_format = stored["format"], arrived["format"]
    if arrived["group"] not in (None, TOKEN_GROUP):
        reason = f"tokens are rounded by groups of {arrived['group']} channels; kernels know {TOKEN_GROUP}"
        return Refusal(reason, node)
    if x_format not in CODE_FORMATS[format].activations:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if x_format == "int8" and format == "int8" and has_zeros:
        return Refusal("int8 weights with zeros are not int8 once their zeros are subtracted", node)
    if x_format == "fp8" and target.fp8_rate is None:
        return Refusal(f"{target.name} ({target.arch_name}) has no fp8 units: only weights can be fp8 on it", node)
    return None


def refuse_groups(node: fx.Node, scales: Tensor, columns: int, format: str) -> Refusal | None:
    """Refuse weights of products and lookups whose scales are not floats, or whose groups no kernel supports.
    scales: [out, groups]."""
    if scales.dtype not in FLOATS:
        return Refusal(f"scales are {scales.dtype}; GPU kernels know float16, bfloat16 and float32", node)
    group = columns // int(scales.shape[1])
    record = CODE_FORMATS[format]
    if record.is_blocked:
        if group % RUN_UNIT == 0:
            return None
        return Refusal(f"{group} columns share a float; kernels support multiples of {RUN_UNIT} in {format}", node)
    least = _LEAST_PAIRED_GROUP if in_pairs(format) else _LEAST_GROUP
    if scales.shape[1] > 1 and (group < least or group & (group - 1)):
        reason = f"groups have {group} columns; kernels support powers of two from {least}, or one group per row"
        return Refusal(reason, node)
    return None


def coded_product(call: Call, epilogue: Epilogue) -> Product:
    """The product that a node asks for, as product.dense_product, of a weight in codes; and of x as it is, or rounded
    to codes."""
    stored = stored_weight(call)
    out, channels = stored.shape("codes")
    product, arrived = codes_product(call, epilogue, stored, (out, channels), stored.code_rows()), call.within("x")
    return expandable(product if arrived is None else _with_numbers(product, arrived))


def codes_product(
    call: Call,
    epilogue: Epilogue,
    stored: Call,
    shape: tuple[int, int],
    parts: Mapping[str, Operand | None],
) -> Product:
    """The same of codes [out, in] that lie anywhere. stored: the call of the weight's op. parts: of Call.code_rows."""
    arrived = call.within("x")
    weight_rows, channels = shape
    groups, format = group_constants(stored), stored.plain("format")
    width = row_bytes(channels, code_rows_layout(format))
    quantize, x_format, x_groups, source = None, "none", 1, call
    if arrived is None:
        x: dict[str, Argument] = {**rows("x", call.rows("x")), "x_scales_ptr": None}
    else:
        quantize, x = quantize_launch(arrived)
        x_format, source = arrived.plain("format"), arrived.within("x") or arrived
        x_groups = token_groups(arrived)
    nbytes = weight_rows * (width + _group_bytes(stored, format, groups["GROUPS"]))
    operands = {**x, **code_pointers(parts)}
    product = product_of(call, epilogue, source, shape, operands)
    constants = {"FORMAT": format, "X_FORMAT": x_format, "ROW_BYTES": width, **groups, "X_GROUPS": x_groups}
    turn = turn_channels(format, channels, groups["GROUPS"])
    if x_groups > 1:
        turn = TOKEN_GROUP
    return replace(
        product,
        constants={**product.constants, **constants},
        codes=Codes(format, x_format, turn, nbytes, quantize),
    )


def _with_numbers(product: Product, arrived: Call) -> Product:
    """The product of rounded tokens, which may read them as numbers if those have 16 bits. arrived: of round_tokens."""
    codes = product.codes
    assert codes is not None and codes.quantize is not None
    if product.itemsize != 2:
        return product
    launch, x = as_numbers(codes.quantize, arrived)
    groups = product.constants["GROUPS"]
    assert isinstance(groups, int)
    turn = turn_channels(codes.format, product.channels, groups)
    numbers = replace(
        product,
        arguments={**product.arguments, **x},
        constants={**product.constants, "X_FORMAT": "none", "X_GROUPS": 1},
        codes=Codes(codes.format, "none", turn, codes.nbytes, launch),
    )
    return replace(product, codes=replace(codes, as_numbers=numbers))


def code_pointers(parts: Mapping[str, Operand | None]) -> dict[str, Argument]:
    """The parameters of kernels for codes. parts: some of Call.code_rows."""
    return {f"{name}_ptr": parts.get(name) for name in CODE_ROW_PARTS}


def group_constants(stored: Call) -> dict[str, int]:
    """The constants of kernels that say how a row's columns share scales: GROUPS of columns with a scale each, and
    FLOATS that these are made of. stored: the call of the weight's op."""
    floats = stored.shape("scales")[1]
    has_steps = CODE_FORMATS[stored.plain("format")].steps is not None
    return {"GROUPS": stored.shape("scale_steps")[1] if has_steps else floats, "FLOATS": floats}


def turn_channels(format: str, channels: int, groups: int) -> int | None:
    """Channels at most that a kernel sums before it scales: of a group, or of two that lie in the halves of bytes; None
    for all of a row."""
    if not by_group(format, groups):
        return None
    return max(_LEAST_GROUP, channels // groups)


def _group_bytes(stored: Call, format: str, groups: int) -> int:
    """Bytes of a row's scales, zeros, minima and steps."""
    floats, record = stored.shape("scales")[1], CODE_FORMATS[format]
    has_zeros = stored.op is _DEQUANTIZE and stored.plain("zeros") is not None
    each = stored.dtype("scales").itemsize * (1 + record.has_minimum)
    return floats * each + groups * has_zeros + (step_row_bytes(groups, format) if record.steps is not None else 0)
