"""The ways to compute a product with a sparse weight on a target, and whether a dense weight would be faster.

In addition to bytes, instructions limit these kernels: for an element's bit, its place, its load and the sum, as
compiled for sm_89 and sm_90. A multiprocessor starts 128 lane instructions per cycle. The share of that rate that the
kernels reach is a starting value until it is measured on a device.
"""

import torch
import triton
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.codegen.triton.kernels.products.product import Product
from llmc.codegen.triton.kernels.products.product_way import MOST_GEMV_ROWS, MOST_SPLIT_ROWS, Tiling, Way, token_block
from llmc.targets import GpuTarget

# The ways whose kernels support masks.
SPARSE_WAYS = frozenset({Way.DENSE_GEMV, Way.DENSE_NARROW, Way.CODED_GEMV, Way.CODED_TILE})
# For each element of a tile; tests count them in the machine code.
INSTRUCTIONS = 18
_ISSUE_SHARE = 0.6
# A warp's columns at a time, eight or sixteen for each lane: a scan over a row's bytes then stays within the warp.
_GEMV_COLUMNS = {1: 512, 2: 256, 4: 256}
# Shares of the memory bandwidth that a product of one token reaches with dense weights and with codes.
_DENSE_SHARE, _CODES_SHARE = 0.9, 0.75


def sparse_gemv(product: Product, target: GpuTarget, tokens: int, way: Way) -> Tiling:
    """One warp per program. It processes several rows together, since single rows would wait for their elements."""
    block = triton.next_power_of_2(tokens)
    out_block = max(1, (2 if product.gated else 4) // block)
    while out_block > 1 and product.outputs < 16 * target.sm_count * out_block:
        out_block //= 2
    itemsize = 1 if product.codes is not None else product.itemsize
    return Tiling(way, block, out_block, _GEMV_COLUMNS[itemsize], 1, 1, 1.0)


def sparse_tilings(product: Product, target: GpuTarget, tokens: int) -> list[Tiling]:
    """The ways that can serve that many rows of x with elements behind masks; of codes, coded_ways.py has them."""
    if tokens <= MOST_GEMV_ROWS:
        return [sparse_gemv(product, target, tokens, Way.DENSE_GEMV)]
    block = token_block(tokens, most=32 if product.itemsize == 4 else 64)
    out_block, in_block = (32, 32) if product.itemsize == 4 else (64, 64)
    counts = (1, 2, 4, 8) if tokens <= MOST_SPLIT_ROWS else (1,)
    return [
        Tiling(Way.DENSE_NARROW, block, out_block, in_block, 4, 2, 0.3, splits)
        for splits in counts
        if splits == 1 or product.channels >= splits * in_block
    ]


def issue_seconds(instructions: int, target: GpuTarget) -> float:
    """Seconds in which the device starts this number of instructions, each of one lane."""
    return instructions / (_ISSUE_SHARE * _issue_rate(target))


def dense_reason(storage: fx.Node, target: GpuTarget) -> str | None:
    """Return why one token's product is predicted to be as fast, or faster, with the weight's zeros stored."""
    given = arguments_of(storage)
    values, masks, columns = given["values"].meta["val"], given["masks"].meta["val"], given["columns"]
    elements, is_codes = int(masks.shape[0]) * columns, storage.target is torch.ops.llmc.sparse_codes.default
    bandwidth = target.bandwidth * (_CODES_SHARE if is_codes else _DENSE_SHARE)
    beside = given["scales"].meta["val"].nbytes if is_codes else 0
    dense = (elements * values.dtype.itemsize + beside) / bandwidth
    stored = (values.nbytes + masks.nbytes + 8 * int(masks.shape[0]) + beside) / bandwidth
    expanding = issue_seconds(elements * INSTRUCTIONS, target)
    if max(stored, expanding) < dense:
        return None
    return (
        f"predicted for one token on {target.name}: {1e6 * dense:.2f} µs with zeros, without them "
        f"{1e6 * stored:.2f} µs to read and {1e6 * expanding:.2f} µs to put {elements} elements into their places "
        f"({INSTRUCTIONS} instructions each)"
    )


def _issue_rate(target: GpuTarget) -> float:
    """Instructions of a lane in a second: one for each fp32 unit and cycle. An A100 starts twice as many; an MI300X,
    whose units take two numbers at a time, half as many."""
    per_unit = {80: 2.0}.get(target.arch, 1.0) if isinstance(target.arch, int) else 0.5
    return target.fp32_rate / 2 * per_unit
