"""llmc::quantized_linear, quantized_gated_linear, quantized_lm_head: the products of linear.py with quantized weights.

x as it is, or rounded to int8 or fp8 codes by a launch before (quantize_tokens.py), which for norm_quantized_linear and
norm_quantized_gated_linear puts it through an RMS norm first. A few tokens are bound by reading
the codes (code_gemv), more are multiplied on the matrix units (code_tile). product_choice picks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from llmc.code_format import CODE_FORMATS
from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.product import Codes, Product
from llmc.codegen.triton.kernels.product_choice import product_launches
from llmc.codegen.triton.kernels.quantize_tokens import quantize_launch
from llmc.codegen.triton.kernels.refusals import FLOATS, refuse_dtypes, refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.launch_arguments import Argument
from llmc.program import code_rows_layout
from llmc.targets import GpuTarget

_LEAST_GROUP = 32


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [rows, channels] and residual of one float dtype; groups of a power of two of columns, or one a row."""
    found = refuse_dtypes(node, "x", "residual") or refuse_ranks(node, x=(2,)) or refuse_codes(node)
    if found is not None:
        return found
    given = arguments_of(node)
    format, x_format = given["format"], given["x_format"]
    if x_format not in CODE_FORMATS[format].activations:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if x_format == "int8" and format == "int8" and given["zeros"] is not None:
        return Refusal("int8 weights with zeros are not int8 once their zeros are subtracted", node)
    if x_format == "fp8" and target.fp8_rate is None:
        return Refusal(f"{target.name} ({target.arch_name}) has no fp8 units: only weights can be fp8 on it", node)
    return None


def refuse_codes(node: fx.Node) -> Refusal | None:
    """What no kernel reads: other scales, other groups."""
    tensors = tensors_of(node)
    scales, columns = tensors["scales"], int(tensors["codes"].shape[1])
    if scales.dtype not in FLOATS:
        return Refusal(f"scales are {scales.dtype}; GPU kernels know float16, bfloat16 and float32", node)
    group = columns // int(scales.shape[1])
    if scales.shape[1] > 1 and (group < _LEAST_GROUP or group & (group - 1)):
        reason = f"groups are of {group} columns; kernels know powers of two from {_LEAST_GROUP} on, or one a row"
        return Refusal(reason, node)
    return None


def supports_norm(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """The same, of x that is rounded after its norm."""
    if arguments_of(node)["x_format"] == "none":
        return Refusal("no kernel norms x on the way to a product that takes it as it is", node)
    return supports(node, target)


def coded_product(
    call: Call,
    *,
    activation: str = "identity",
    scale: float = 1.0,
    has_residual: bool = False,
    gated: bool = False,
    normed: bool = False,
) -> Product:
    """The product that a node asks for, as product.product_of. normed: of x after the node's norm."""
    weight_rows, channels = call.shape("codes")
    groups, format, x_format = call.shape("scales")[1], call.plain("format"), call.plain("x_format")
    codes, scales, zeros = call.code_rows()
    width, outputs = row_bytes(channels, code_rows_layout(format)), weight_rows // 2 if gated else weight_rows
    quantize: DeviceLaunch | None = None
    x: dict[str, Argument] = {**rows("x", call.rows("x")), "x_scales_ptr": None}
    if x_format != "none":
        quantize, x = quantize_launch(call, x_format, normed=normed)
    nbytes = weight_rows * (width + groups * (call.dtype("scales").itemsize + (zeros is not None)))
    arguments: dict[str, Argument] = {
        **x,
        "codes_ptr": codes,
        "scales_ptr": scales,
        "zeros_ptr": zeros,
        "bias_ptr": call.vector("bias"),
        **rows("residual", call.rows("residual") if has_residual else None),
        **rows("y", call.result()),
        "tokens": call.count("x"),
        "scale": scale,
    }
    itemsize = call.dtype("x").itemsize
    return Product(
        call,
        arguments,
        {
            "IN": channels,
            "OUT": outputs,
            "GATED": gated,
            "ACTIVATION": activation,
            "FORMAT": format,
            "X_FORMAT": x_format,
            "ROW_BYTES": width,
            "GROUPS": groups,
        },
        call.count("x"),
        channels,
        outputs,
        gated,
        itemsize,
        itemsize,
        has_aligned_rows=False,
        codes=Codes(format, x_format, channels // groups if groups > 1 else None, nbytes, quantize, x),
    )


def quantized_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(x·Wᵀ + bias)·scale + residual."""
    activation, scale = call.plain("activation"), call.plain("scale")
    return product_launches(coded_product(call, activation=activation, scale=scale, has_residual=True), target)


def quantized_gated_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(x·gateᵀ + bias)·(x·upᵀ + bias)."""
    return product_launches(coded_product(call, activation=call.plain("activation"), gated=True), target)


def norm_quantized_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(rms_norm(x)·Wᵀ + bias)·scale + residual."""
    activation, scale = call.plain("activation"), call.plain("scale")
    product = coded_product(call, activation=activation, scale=scale, has_residual=True, normed=True)
    return product_launches(product, target)


def norm_quantized_gated_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(rms_norm(x)·gateᵀ + bias)·(rms_norm(x)·upᵀ + bias)."""
    product = coded_product(call, activation=call.plain("activation"), gated=True, normed=True)
    return product_launches(product, target)


def quantized_lm_head_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """x·Wᵀ + bias, left in fp32."""
    return product_launches(replace(coded_product(call), result_itemsize=4), target)


_llmc = torch.ops.llmc
quantized_linear = KernelTemplate(_llmc.quantized_linear.default, supports, quantized_linear_candidates)
quantized_gated_linear = KernelTemplate(
    _llmc.quantized_gated_linear.default, supports, quantized_gated_linear_candidates
)
quantized_lm_head = KernelTemplate(_llmc.quantized_lm_head.default, supports, quantized_lm_head_candidates)
norm_quantized_linear = KernelTemplate(
    _llmc.norm_quantized_linear.default, supports_norm, norm_quantized_linear_candidates
)
norm_quantized_gated_linear = KernelTemplate(
    _llmc.norm_quantized_gated_linear.default, supports_norm, norm_quantized_gated_linear_candidates
)
