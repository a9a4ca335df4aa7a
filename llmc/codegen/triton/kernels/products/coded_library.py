"""Products of rounded tokens and a weight of the same codes by the library: sums of codes, and a launch with scales.

    sums[t, o] = Σ_c code_x[t, c] · code_w[o, c],   y[t, o] = sums[t, o] · scale_x[t] · scale_w[o], and the epilogue

The library multiplies fp8 with sums in fp32 (use_fast_accum=False) and int8 with sums in int32. It reads the codes as
the other kernels do: W [OUT, IN] in rows. A library's own scales for each token and row (`_scaled_mm` with row-wise
scales) would save the second launch where nothing follows the product. They are not used: which kernel computes them,
and whether it keeps to its stream, depends on the versions of torch and CUDA.
"""

import torch

from llmc.codegen.triton.kernels.products.product import Product, most_rows
from llmc.codegen.triton.kernels.products.product_way import Tiling, Way
from llmc.targets import GpuTarget

# Tokens from which the library multiplies int8; fewer are for kernels that read the weight once.
_LEAST_TOKENS = 17
# The number of channels, and of rows, is a multiple.
_MULTIPLE = 16
# Architectures whose library multiplies the codes.
_LEAST_ARCH = {"fp8": 89, "int8": 80}
# The share of the memory that the sums of the largest step may take.
_MOST_SUMS = 1 / 64
# The share of the peak rate: lower than that of bf16 products, because sums of fp8 are moved to fp32 registers.
# Assumed, not measured.
_EFFICIENCY = 0.6


def library_tilings(product: Product, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    """The library's way, if it can multiply that many tokens on the target."""
    if tokens < _LEAST_TOKENS or library_obstacle(product, target) is not None:
        return ()
    return (Tiling(Way.LIBRARY, 128, 128, 128, 4, 1, _EFFICIENCY),)


def library_obstacle(product: Product, target: GpuTarget) -> str | None:
    """Return why the library cannot multiply the product's codes; None if it can."""
    codes = product.codes
    assert codes is not None, "a product of codes"
    format, x_format = codes.format, codes.x_format
    if format not in _LEAST_ARCH or x_format != format:
        return f"it multiplies fp8 by fp8 and int8 by int8, not {x_format} tokens by {format} weights"
    if target.backend != "cuda" or int(target.arch) < _LEAST_ARCH[format]:
        return f"{target.name} ({target.arch_name}) has no library product of {format}"
    if product.sparse is not None or product.arguments["zeros_ptr"] is not None:
        return "the weight is stored without its zeros, or has zero points"
    groups = product.constants["GROUPS"], product.constants["X_GROUPS"]
    if groups != (1, 1):
        return f"rows of the weight have {groups[0]} scales and tokens {groups[1]}; it multiplies whole rows"
    for name, size in (("channels", product.channels), ("rows", product.weight_rows)):
        if size % _MULTIPLE:
            return f"the weight has {size} {name}, which is not a multiple of {_MULTIPLE}"
    nbytes = most_rows(product.call, product.count) * product.weight_rows * sums_dtype(product).itemsize
    if nbytes > _MOST_SUMS * target.memory_bytes:
        return f"the sums of the largest step take {nbytes / 1e9:.2f} GB of {target.memory_bytes / 1e9:.0f} GB"
    return None


def sums_dtype(product: Product) -> torch.dtype:
    """The dtype of a library's product that another launch finishes: x's. For fp8 codes fp32 instead, if x is fp16,
    which their sums exceed, or if the result is fp32."""
    call, codes = product.call, product.codes
    if codes is None:
        return call.dtype("x")
    if codes.format == "int8":
        return torch.int32
    arrived = call.within("x")
    assert arrived is not None, "tokens are rounded"
    dtype = (arrived.within("x") or arrived).dtype("x")
    return dtype if dtype is torch.bfloat16 and product.result_itemsize == dtype.itemsize else torch.float32
