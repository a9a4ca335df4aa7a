"""Which product kernel, in which tiles, for how many rows: every way that fits the target, by predicted time.

The prediction is the roofline's, max(bytes / bandwidth, operations / rate), with what a tiling adds to it: processors
left idle by the last wave of programs or by too few of them, partial sums written and read, a second launch. The shares
of the peak that a shape reaches are starting values, to be replaced by measurement on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from llmc.codegen.call import Argument
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, rows
from llmc.codegen.triton.kernels.product import Product
from llmc.codegen.triton.kernels.product_gemv import gemv_kernel
from llmc.codegen.triton.kernels.product_narrow import add_splits_kernel, narrow_kernel
from llmc.codegen.triton.kernels.product_persistent import persistent_kernel
from llmc.codegen.triton.kernels.product_tile import tile_kernel
from llmc.program import RowCount
from llmc.targets import GpuTarget

# Row counts up to which one choice serves, each judged at its upper end; the last one at twice the one before.
_BUCKETS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, None)
_MOST_GEMV_ROWS = 4
_MOST_NARROW_ROWS = 256
_ALTERNATIVES = 2
_SECONDS_PER_LAUNCH = 2e-6
# Of the processors, how many must have a program with loads in flight before the memory is the limit.
_BUSY_SHARE = 0.7
_RESERVED_SHARED_BYTES = 2048
_GROUP = 8


@dataclass(frozen=True)
class Tiling:
    """One way to cut a product. kernel: gemv, narrow, tile or persistent. efficiency: the share of the peak rate that
    its inner loop reaches."""

    kernel: str
    token_block: int
    out_block: int
    in_block: int
    num_warps: int
    num_stages: int
    efficiency: float
    splits: int = 1


def product_launches(product: Product, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """The predicted fastest launch for each range of row counts that a step can have; then runners-up, to measure."""
    best: list[DeviceLaunch] = []
    others: list[DeviceLaunch] = []
    start = 1
    previous: Tiling | None = None
    limits = product.call.limits()
    most = limits.max_logit_rows if product.count == RowCount.LOGIT_ROWS.value else limits.max_batch_tokens
    for bucket in _BUCKETS:
        end = None if bucket is None or bucket >= most else bucket
        tokens = min(most, bucket or 4 * start)
        order = sorted(tilings(product, target, tokens), key=lambda t: predicted_seconds(product, target, t, tokens))
        first, *rest = order
        if previous == first:
            best[-1] = replace(best[-1], max_tokens=end)
        else:
            best.append(replace(_launch(product, target, first), min_tokens=start, max_tokens=end))
        runners = rest[:_ALTERNATIVES]
        others += [replace(_launch(product, target, t), min_tokens=start, max_tokens=end) for t in runners]
        if end is None:
            break
        previous, start = first, end + 1
    return (*best, *others)


def tilings(product: Product, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    """The ways that can serve that many rows on the target."""
    if tokens <= _MOST_GEMV_ROWS:
        return (_gemv(product, target, tokens),)
    shapes = _shapes(product, target, tokens)
    fitting = (_fit(product, target, shape) for shape in shapes)
    return tuple(shape for shape in fitting if shape is not None)


def predicted_seconds(product: Product, target: GpuTarget, tiling: Tiling, tokens: int) -> float:
    """Seconds of one product of that many rows."""
    out_tiles = triton.cdiv(product.outputs, tiling.out_block)
    programs = out_tiles * triton.cdiv(tokens, tiling.token_block) * tiling.splits
    waves = triton.cdiv(programs, target.sm_count)
    partial = 2 * 4 * tiling.splits * tokens * product.weight_rows if tiling.splits > 1 else 0
    busy = min(1.0, programs / (_BUSY_SHARE * target.sm_count))
    memory = (product.bytes_moved(tokens) + partial) / (target.bandwidth * busy)
    padded = 2 * tiling.token_block * tiling.out_block * product.channels * (2 if product.gated else 1)
    rate = _rate(product, target) * tiling.efficiency / target.sm_count
    arithmetic = waves * padded / tiling.splits / rate
    seconds: float = max(memory, arithmetic) + (_SECONDS_PER_LAUNCH if tiling.splits > 1 else 0.0)
    return seconds


def _rate(product: Product, target: GpuTarget) -> float:
    return target.fp32_rate if product.itemsize == 4 else target.bf16_rate


def _gemv(product: Product, target: GpuTarget, tokens: int) -> Tiling:
    """16 bytes a thread along the channels; fewer outputs a program where there would be too few programs."""
    per_warp = target.warp_size * 16 // product.itemsize
    warps = next(
        (w for w in (4, 2) if product.channels % (w * per_warp) == 0), 1 if product.channels <= per_warp else 4
    )
    sums = tokens * (2 if product.gated else 1)
    out_block = max(1, min(4, 8 // sums))
    while out_block > 1 and product.outputs < 4 * target.sm_count * out_block:
        out_block //= 2
    return Tiling("gemv", triton.next_power_of_2(tokens), out_block, warps * per_warp, warps, 1, 1.0)


def _shapes(product: Product, target: GpuTarget, tokens: int) -> list[Tiling]:
    """Shapes that compile without spilling for every target: fp32 has no matrix units, and gating doubles the sums."""
    if product.itemsize == 4:
        counts = (1, 2, 4, 8) if tokens <= _MOST_NARROW_ROWS else (1,)
        return [Tiling("narrow", min(32, _block(tokens)), 32, 32, 4, 2, 0.3, splits) for splits in counts]
    shapes: list[Tiling] = []
    if tokens <= _MOST_NARROW_ROWS:
        block = min(64 if product.gated else 128, _block(tokens))
        in_block = 128 if block * (2 if product.gated else 1) <= 64 else 64
        for splits in (1, 2, 4, 8):
            if splits == 1 or product.channels >= splits * in_block:
                shapes.append(Tiling("narrow", block, 64, in_block, 8 if block >= 64 else 4, 4, 0.4, splits))
    if tokens > 64:
        wide, half = (128, 64) if product.gated else (256, 128)
        if target.has_tma and product.has_aligned_rows:
            if product.result_itemsize < 4:
                shapes.append(Tiling("persistent", 128, wide, 64, 8, 3, 0.75))
            shapes.append(Tiling("persistent", 128, half, 64, 8, 4, 0.6))
        in_block = 64 if target.has_tma or target.backend == "hip" else 32
        shapes.append(Tiling("tile", 128, half, in_block, 8, 4, 0.55))
        shapes.append(Tiling("tile", 64, half, 32, 4, 4, 0.45))
    return shapes


def _block(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())


def _fit(product: Product, target: GpuTarget, tiling: Tiling) -> Tiling | None:
    """With as many stages, of at least two, as the target's shared memory holds; None if it does not hold two."""
    outs = tiling.out_block * (2 if product.gated else 1)
    stage = (tiling.token_block + outs) * tiling.in_block * product.itemsize
    # On AMD GPUs the tile in use lies in registers, so that one stage fewer is in shared memory.
    in_registers = 1 if target.backend == "hip" else 0
    most = (target.shared_memory_per_block - _RESERVED_SHARED_BYTES) // stage + in_registers
    stages = min(tiling.num_stages, most, 2 if target.backend == "hip" else 8)
    return replace(tiling, num_stages=stages) if stages >= 2 else None


def _launch(product: Product, target: GpuTarget, tiling: Tiling) -> DeviceLaunch:
    out_tiles = triton.cdiv(product.outputs, tiling.out_block)
    token_tiles = f"cdiv({product.count}, {tiling.token_block})"
    constants: dict[str, Constant] = {
        **product.constants,
        "OUT_BLOCK": tiling.out_block,
        "IN_BLOCK": tiling.in_block,
    }
    if tiling.kernel == "gemv":
        constants["TOKENS"] = tiling.token_block
        return _with(gemv_kernel, product, constants, (str(out_tiles),), tiling)
    constants |= {"TOKEN_BLOCK": tiling.token_block, "UPCAST": False}
    if tiling.kernel == "narrow":
        constants["SPLITS"] = tiling.splits
        whole = _with(narrow_kernel, product, constants, (str(out_tiles), token_tiles, str(tiling.splits)), tiling)
        return whole if tiling.splits == 1 else _split(product, whole, tiling.splits)
    constants["GROUP"] = _GROUP
    if tiling.kernel == "tile":
        return _with(tile_kernel, product, constants, (f"{token_tiles} * {out_tiles}",), tiling)
    constants["PROGRAMS"] = target.sm_count
    grid = (f"min({target.sm_count}, {token_tiles} * {out_tiles})",)
    return _with(persistent_kernel, product, constants, grid, tiling)


def _with(
    function: Any, product: Product, constants: dict[str, Constant], grid: tuple[str, ...], tiling: Tiling
) -> DeviceLaunch:
    return DeviceLaunch(
        function,
        product.arguments,
        constants,
        grid,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _split(product: Product, whole: DeviceLaunch, splits: int) -> DeviceLaunch:
    """The launch with its sums going to a workspace, and the one that adds them up."""
    columns = splits * product.weight_rows
    # A fixed size: only this many rows are ever split, while a step may have many more.
    workspace = product.call.workspace(
        f"partial_sums_{splits}", RowCount.ONE, _MOST_NARROW_ROWS * columns, torch.float32
    )
    pointer = workspace.partition("/")[0]
    no_residual: dict[str, Argument] = rows("residual", None)
    into: dict[str, Argument] = {"y_ptr": pointer, "y_row_stride": columns, "bias_ptr": None, **no_residual}
    shared = ("bias_ptr", "residual_ptr", "residual_row_stride", "y_ptr", "y_row_stride", "tokens", "scale")
    block = min(1024, triton.next_power_of_2(product.outputs))
    arguments: dict[str, Argument] = {"partial_ptr": pointer, "partial_row_stride": columns}
    arguments |= {name: product.arguments[name] for name in shared}
    finish = DeviceLaunch(
        add_splits_kernel,
        arguments,
        {
            "OUT": product.outputs,
            "GATED": product.gated,
            "ACTIVATION": product.constants["ACTIVATION"],
            "OUT_BLOCK": block,
            "SPLITS": splits,
        },
        (str(triton.cdiv(product.outputs, block)), str(product.count)),
    )
    constants = {**whole.constants, "ACTIVATION": "identity"}
    return replace(whole, arguments={**whole.arguments, **into}, constants=constants, then=(finish,))
