"""Products of weights that are codes: the arguments of the kernels for them, and what those do not read.

x as it is, or rounded to int8 or fp8 codes by a launch before (quantize_tokens.py), which may put it through an RMS
norm first. A few tokens are bound by reading the codes (code_gemv), more are multiplied on the matrix units
(code_tile).
"""

from dataclasses import replace

from torch import Tensor, fx

from llmc.codegen.call import Call, arguments_of, stored_weight
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import rows
from llmc.codegen.triton.kernels.products.product import Codes, Epilogue, Product, product_of
from llmc.codegen.triton.kernels.products.quantize_tokens import quantize_launch
from llmc.codegen.triton.kernels.refusals import FLOATS, tensors_of
from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal
from llmc.program import code_rows_layout
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget

_LEAST_GROUP = 32


def coded_refusal(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Groups of a power of two of columns, or one a row; x as it is, or in codes that multiply the weight's."""
    weight = unrounded_parts(node)["weight"]
    tensors, format = tensors_of(weight), arguments_of(weight)["format"]
    if CODE_FORMATS[format].is_blocked:
        return Refusal(f"GPU kernels do not read {format} so far", node)
    refused = refuse_groups(node, tensors["scales"], int(tensors["codes"].shape[1]))
    return refused or refuse_arrival(node, target, has_zeros="zeros" in tensors)


def refuse_arrival(node: fx.Node, target: GpuTarget, *, has_zeros: bool) -> Refusal | None:
    """What codes of x no kernel multiplies with the weight's. has_zeros: whether those have zero points."""
    parts = unrounded_parts(node)
    stored = arguments_of(parts["weight"])
    format, x_format = stored["format"], arguments_of(parts["x"])["format"] if "x" in parts else "none"
    if "x" in parts and arguments_of(parts["x"])["group"] is not None:
        return Refusal("GPU kernels have one scale for each token", node)
    if x_format not in CODE_FORMATS[format].activations:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if x_format == "int8" and format == "int8" and has_zeros:
        return Refusal("int8 weights with zeros are not int8 once their zeros are subtracted", node)
    if x_format == "fp8" and target.fp8_rate is None:
        return Refusal(f"{target.name} ({target.arch_name}) has no fp8 units: only weights can be fp8 on it", node)
    return None


def refuse_groups(node: fx.Node, scales: Tensor, columns: int) -> Refusal | None:
    """What no kernel reads of a product's or lookup's weight: other scales than of floats, other groups. scales: [out,
    groups]."""
    if scales.dtype not in FLOATS:
        return Refusal(f"scales are {scales.dtype}; GPU kernels know float16, bfloat16 and float32", node)
    group = columns // int(scales.shape[1])
    if scales.shape[1] > 1 and (group < _LEAST_GROUP or group & (group - 1)):
        reason = f"groups are of {group} columns; kernels know powers of two from {_LEAST_GROUP} on, or one a row"
        return Refusal(reason, node)
    return None


def coded_product(call: Call, epilogue: Epilogue) -> Product:
    """The product that a node asks for, as product.dense_product, of a weight in codes; and of x as it is, or rounded
    to codes."""
    stored = stored_weight(call)
    out, channels = stored.shape("codes")
    return codes_product(call, epilogue, stored, (out, channels), stored.code_rows())


def codes_product(
    call: Call,
    epilogue: Epilogue,
    stored: Call,
    shape: tuple[int, int],
    parts: tuple[Operand, Operand, Operand | None],
) -> Product:
    """The same of codes [out, in], scales and zeros that lie anywhere. stored: the call of the weight's op."""
    arrived = call.within("x")
    weight_rows, channels = shape
    groups, format = stored.shape("scales")[1], stored.plain("format")
    codes, scales, zeros = parts
    width = row_bytes(channels, code_rows_layout(format))
    quantize, x_format, source = None, "none", call
    if arrived is None:
        x: dict[str, Argument] = {**rows("x", call.rows("x")), "x_scales_ptr": None}
    else:
        quantize, x = quantize_launch(arrived)
        x_format, source = arrived.plain("format"), arrived.within("x") or arrived
    nbytes = weight_rows * (width + groups * (stored.dtype("scales").itemsize + (zeros is not None)))
    operands = {**x, "codes_ptr": codes, "scales_ptr": scales, "zeros_ptr": zeros}
    product = product_of(call, epilogue, source, shape, operands)
    constants = {"FORMAT": format, "X_FORMAT": x_format, "ROW_BYTES": width, "GROUPS": groups}
    return replace(
        product,
        constants={**product.constants, **constants},
        codes=Codes(format, x_format, channels // groups if groups > 1 else None, nbytes, quantize),
    )
