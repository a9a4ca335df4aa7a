"""llmc::linear, fused_linear, gated_linear, lm_head: y = activation(x·Wᵀ + bias)·scale + residual, or gated.

norm_linear and norm_gated_linear put x through an RMS norm first, in the product's kernel or in a launch before it.

One to four rows are bound by reading W (product_gemv), a few dozen too, on the matrix units (product_narrow); many are
bound by arithmetic (product_tile, product_persistent). All sum in fp32 and round once. product_choice picks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.product import Norm, Product, product_of
from llmc.codegen.triton.kernels.product_choice import product_launches
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.rms_norm import norm_of_x
from llmc.graph.refusal import Refusal
from llmc.launch_arguments import Count
from llmc.targets import GpuTarget


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [rows, channels] and residual of one float dtype; the weight's is not wider, since it is stored as x's."""
    found = refuse_dtypes(node, "x", "residual") or refuse_dtypes(node, "weight") or refuse_ranks(node, x=(2,))
    if found is not None:
        return found
    tensors = tensors_of(node)
    x, weight = tensors["x"], tensors["weight"]
    if weight.dtype.itemsize > x.dtype.itemsize:
        return Refusal(f"the weight is {weight.dtype} but x is {x.dtype}: storing it as that would lose digits", node)
    return None


def linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """x·Wᵀ + bias."""
    return product_launches(product_of(call), target)


def fused_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(x·Wᵀ + bias)·scale + residual."""
    product = product_of(call, activation=call.plain("activation"), scale=call.plain("scale"), has_residual=True)
    return product_launches(product, target)


def gated_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(x·gateᵀ + bias)·(x·upᵀ + bias)."""
    return product_launches(product_of(call, activation=call.plain("activation"), gated=True), target)


def lm_head_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """x·Wᵀ + bias, left in fp32."""
    return product_launches(replace(product_of(call), result_itemsize=4), target)


def norm_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """rms_norm(x)·Wᵀ + bias."""
    return product_launches(_normed(call, product_of(call)), target)


def norm_gated_linear_candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """activation(rms_norm(x)·gateᵀ + bias)·(rms_norm(x)·upᵀ + bias)."""
    product = product_of(call, activation=call.plain("activation"), gated=True)
    return product_launches(_normed(call, product), target)


def _normed(call: Call, product: Product) -> Product:
    workspace = call.workspace("normed", Count.TOKENS, product.channels, call.dtype("x"))
    norm, eps = call.vector("norm"), float(call.plain("eps"))
    launch = norm_of_x(call, norm, into=workspace)
    return replace(product, norm=Norm({"norm_ptr": norm, "eps": eps}, launch, rows("x", workspace)))


linear = KernelTemplate(torch.ops.llmc.linear.default, supports, linear_candidates)
fused_linear = KernelTemplate(torch.ops.llmc.fused_linear.default, supports, fused_linear_candidates)
gated_linear = KernelTemplate(torch.ops.llmc.gated_linear.default, supports, gated_linear_candidates)
lm_head = KernelTemplate(torch.ops.llmc.lm_head.default, supports, lm_head_candidates)
norm_linear = KernelTemplate(torch.ops.llmc.norm_linear.default, supports, norm_linear_candidates)
norm_gated_linear = KernelTemplate(torch.ops.llmc.norm_gated_linear.default, supports, norm_gated_linear_candidates)
