"""The ways to compute a matrix product on a target, and the predicted time of each.

The prediction is the roofline's, max(bytes / bandwidth, operations / rate), plus the costs of a way: processors left
idle by the last wave of programs or by too few programs, partial sums written and read, further launches. The shares
of bandwidth and peak that each way reaches are starting values until `llmc tune` measures on a device.
"""

from dataclasses import replace

import triton

from llmc.codegen.triton.dependent_launch import releases_next_launch
from llmc.codegen.triton.kernels.products.coded_library import library_tilings, sums_dtype
from llmc.codegen.triton.kernels.products.coded_ways import (
    code_operands,
    code_tilings,
    gemv_instructions,
    tile_instructions,
)
from llmc.codegen.triton.kernels.products.product import Product
from llmc.codegen.triton.kernels.products.product_way import MOST_GEMV_ROWS, MOST_SPLIT_ROWS, Tiling, Way, token_block
from llmc.codegen.triton.kernels.products.sparse_ways import INSTRUCTIONS, issue_seconds, sparse_tilings
from llmc.targets import GpuTarget

# Share of the processors that must have a program with loads in flight before memory is the limit.
_BUSY_SHARE = 0.7
# Programs of one multiprocessor at a time, of the kernels that the memory bounds.
_PROGRAMS_AT_ONCE = 8
# The L2 cache's bandwidth over the memory's.
_L2_SPEED = 2.0
_RESERVED_SHARED_BYTES = 2048
# A barrier, an atomic, and the sums of other programs from the L2 cache; assumed, not measured.
_JOINING_SECONDS = 1e-6
# Share of the memory bandwidth that is reached when a weight is expanded, and the share of the memory that the largest
# weight may take then. Weights share their workspace.
_EXPANDING_SHARE, _MOST_EXPANDED = 0.8, 1 / 64


# Share of the memory bandwidth that each way reaches where memory is the limit.
_BANDWIDTH_SHARE = {
    Way.DENSE_GEMV: 0.9,
    Way.DENSE_NARROW: 0.85,
    Way.DENSE_TILE: 0.8,
    Way.DENSE_PERSISTENT: 0.85,
    Way.CODED_GEMV: 0.75,
    Way.CODED_NARROW: 0.6,
    Way.CODED_TILE: 0.7,
    Way.LIBRARY: 0.8,
}
# Ways that can norm x themselves, and the share of their bandwidth that is left: on an H200 a narrow kernel that normed
# its 32 tokens took 20 us for 50 MB, where one that does not needs 15.
_NORMING = {Way.DENSE_GEMV: 1.0, Way.DENSE_NARROW: 0.75}


def tilings(product: Product, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    """The ways that can serve that many rows on the target."""
    found, expansion = _tilings(product, target, tokens), product.expansion
    if expansion is None or tokens < expansion.least_rows:
        return found
    if expansion.nbytes > _MOST_EXPANDED * target.memory_bytes:
        return found
    others = _tilings(expansion.product, target, tokens)
    return found + tuple(replace(t, expanded=True) for t in others if expansion.ways is None or t.way in expansion.ways)


def _tilings(product: Product, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    """The tilings that read W as it is stored."""
    if product.codes is not None:
        return (*code_tilings(product, product.codes, target, tokens), *library_tilings(product, target, tokens))
    if product.sparse is not None:
        shapes = sparse_tilings(product, target, tokens)
    else:
        few = tokens <= _most_gemv_rows(product, target)
        shapes = [_gemv(product, target, tokens)] if few else _shapes(product, target, tokens)
    fitting = [found for found in (_fit(product, target, shape) for shape in shapes) if found is not None]
    if product.norm is not None:
        fitting += [
            replace(t, normed=True, efficiency=t.efficiency * (1.0 if t.way is Way.DENSE_GEMV else 0.6))
            for t in fitting
            if t.way in _NORMING and t.splits == 1
        ]
    if product.sparse is None and product.result_itemsize == product.itemsize:
        fitting.append(Tiling(Way.LIBRARY, 128, 128, 64, 4, 1, 0.75))
    return tuple(fitting)


def predicted_seconds(product: Product, target: GpuTarget, tiling: Tiling, tokens: int) -> float:
    """Seconds of one product of that many rows, all its launches included."""
    if tiling.expanded:
        expansion = product.expansion
        assert expansion is not None
        issued = issue_seconds(product.weight_rows * product.channels * expansion.instructions, target)
        both = product.weight_nbytes + expansion.nbytes
        expanding = max(both / (_EXPANDING_SHARE * target.bandwidth), issued)
        after = predicted_seconds(expansion.product, target, replace(tiling, expanded=False), tokens)
        return expanding + target.launch + after
    if tiling.as_numbers:
        assert product.codes is not None and product.codes.as_numbers is not None
        return predicted_seconds(product.codes.as_numbers, target, replace(tiling, as_numbers=False), tokens)
    out_tiles = triton.cdiv(product.outputs, tiling.out_block)
    programs = out_tiles * triton.cdiv(tokens, tiling.token_block) * tiling.splits
    moved, launches, after = float(product.bytes_moved(tokens)), 1, 0.0
    if tiling.splits > 1:
        moved, after = moved + 2 * 4 * tiling.splits * tokens * product.weight_rows, _JOINING_SECONDS
    if needs_finish(product, tiling):
        nbytes = sums_dtype(product).itemsize * tokens * product.weight_rows
        moved, launches = moved + 2 * nbytes, launches + 1
        # Sums of codes are scaled when all of them are there.
        after = 0.0 if product.codes is None else nbytes / target.bandwidth
    if product.norm is not None and not tiling.normed:
        moved, launches = moved + 2 * product.itemsize * tokens * product.channels, launches + 1
    if product.codes is not None and product.codes.quantize is not None:
        moved, launches = moved + 2 * tokens * product.channels, launches + 1
    if tiling.normed:
        # The programs of a multiprocessor that run at the same time share the norm's weight in its L1 cache.
        rounds = min(programs, target.sm_count * triton.cdiv(programs, target.sm_count * _PROGRAMS_AT_ONCE))
        moved += rounds * 4 * product.channels / _L2_SPEED
    if tiling.way is Way.LIBRARY:
        # Where one tile a processor does not fill the GPU, it splits the sums and adds them up in a separate launch.
        launches += 1
        busy, arithmetic = 1.0, product.operations(tokens) / (_rate(product, target) * tiling.efficiency)
    else:
        busy = min(1.0, programs / (_BUSY_SHARE * target.sm_count))
        padded = 2 * tiling.token_block * tiling.out_block * product.channels * (2 if product.gated else 1)
        rate = _rate(product, target) * tiling.efficiency / target.sm_count
        arithmetic = triton.cdiv(programs, target.sm_count) * padded / tiling.splits / rate
    if tiling.way is Way.CODED_GEMV and product.codes is not None and product.sparse is None:
        instructions = product.codes.nbytes * gemv_instructions(product.codes, tiling.token_block)
        arithmetic += issue_seconds(instructions, target) / busy
    if tiling.way is Way.CODED_TILE and product.codes is not None and product.codes.x_format != "none":
        each = tile_instructions(product.codes, int(product.constants["X_GROUPS"] or 1), tiling.token_block)
        instructions = int(product.codes.nbytes * each) * triton.cdiv(tokens, tiling.token_block)
        arithmetic = max(arithmetic, issue_seconds(instructions, target) / busy)
    if product.sparse is not None:
        elements, tiles = product.weight_rows * product.channels, triton.cdiv(tokens, tiling.token_block)
        arithmetic += issue_seconds(elements * tiles * INSTRUCTIONS, target) / busy
    share = _BANDWIDTH_SHARE[tiling.way] * (_NORMING[tiling.way] if tiling.normed else 1.0)
    memory = moved / (target.bandwidth * busy * share)
    return float(max(memory, arithmetic) + after + (launches - 1) * target.launch)


def needs_finish(product: Product, tiling: Tiling) -> bool:
    """Whether a library's product is followed by a launch that does the rest."""
    is_plain = product.constants["ACTIVATION"] == "identity" and product.arguments["scale"] == 1.0
    is_plain = is_plain and product.codes is None
    is_plain = is_plain and all(product.arguments[name] is None for name in ("bias_ptr", "delta_ptr", "residual_ptr"))
    return tiling.way is Way.LIBRARY and not (is_plain and not product.gated)


def _rate(product: Product, target: GpuTarget) -> float:
    operands = None if product.codes is None else code_operands(product, product.codes, target)
    if operands == "fp8" and target.fp8_rate is not None:
        return target.fp8_rate
    if operands == "int8":
        return 2 * target.bf16_rate
    return target.fp32_rate if product.itemsize == 4 else target.bf16_rate


def _most_gemv_rows(product: Product, target: GpuTarget) -> int:
    """Rows up to which vectors are multiplied. Sums of several tokens take registers, and then too few bytes are in
    flight on newer NVIDIA GPUs, and too many instructions are issued on others: matrix units do these products."""
    if product.itemsize == 4 or target.backend != "cuda":
        return MOST_GEMV_ROWS
    return 1 if releases_next_launch(target) else 2


def _gemv(product: Product, target: GpuTarget, tokens: int) -> Tiling:
    """16 bytes per thread along the channels; fewer outputs per program where there would be too few programs.

    For one token, long rows are read 4 KiB at a time: products of an 8B model took 5 to 20% less time on an H200. A
    B200 needs more bytes in flight than these programs have: there they have two rows and 8 warps.
    """
    per_warp = target.warp_size * 16 // product.itemsize
    wide = 8 * per_warp
    if tokens == 1 and product.channels >= 4 * wide and product.channels % wide == 0:
        out_block, warps = (2, 8) if target.arch == 100 else (1, 4)
        return Tiling(Way.DENSE_GEMV, 1, out_block, wide, warps, 1, 1.0)
    counts = (8, 4, 2) if tokens == 1 and product.channels >= 2 * wide else (4, 2)
    warps = next(
        (w for w in counts if product.channels % (w * per_warp) == 0), 1 if product.channels <= per_warp else 4
    )
    sums = tokens * (2 if product.gated else 1)
    out_block = max(1, min(4, (4 if tokens == 1 else 8) // sums))
    while out_block > 1 and product.outputs < 4 * target.sm_count * out_block:
        out_block //= 2
    return Tiling(Way.DENSE_GEMV, triton.next_power_of_2(tokens), out_block, warps * per_warp, warps, 1, 1.0)


def _shapes(product: Product, target: GpuTarget, tokens: int) -> list[Tiling]:
    """Shapes that compile without spilling for every target: fp32 has no matrix units, and gating doubles the sums."""
    if product.itemsize == 4:
        counts = (1, 2, 4, 8) if tokens <= MOST_SPLIT_ROWS else (1,)
        block = token_block(tokens, most=32)
        return [Tiling(Way.DENSE_NARROW, block, 32, 32, 4, 2, 0.3, splits) for splits in counts]
    shapes: list[Tiling] = []
    if tokens <= MOST_SPLIT_ROWS:
        block = token_block(tokens, most=64 if product.gated else 128)
        in_block = 128 if block * (2 if product.gated else 1) <= 64 else 64
        for splits in (1, 2, 4, 8):
            if splits == 1 or product.channels >= splits * in_block:
                warps, stages = 8 if block >= 64 else 4, 4 if product.gated else 5
                shapes.append(Tiling(Way.DENSE_NARROW, block, 64, in_block, warps, stages, 0.4, splits))
    if tokens > 64:
        wide, half = (128, 64) if product.gated else (256, 128)
        if target.has_tma and product.has_aligned_rows:
            if product.result_itemsize < 4:
                shapes.append(Tiling(Way.DENSE_PERSISTENT, 128, wide, 64, 8, 3, 0.75))
            shapes.append(Tiling(Way.DENSE_PERSISTENT, 128, half, 64, 8, 4, 0.6))
        in_block = 64 if target.has_tma or target.backend == "hip" else 32
        shapes.append(Tiling(Way.DENSE_TILE, 128, half, in_block, 8, 4, 0.55))
        shapes.append(Tiling(Way.DENSE_TILE, 64, half, 32, 4, 4, 0.45))
    return shapes


def _fit(product: Product, target: GpuTarget, tiling: Tiling) -> Tiling | None:
    """The tiling with the most stages that fit into the target's shared memory; None if two do not fit."""
    if tiling.way is Way.DENSE_GEMV:
        return tiling
    outs = tiling.out_block * (2 if product.gated else 1)
    stage = (tiling.token_block + outs) * tiling.in_block * product.itemsize
    # On AMD GPUs the tile in use lies in registers, so that one stage fewer is in shared memory.
    in_registers = 1 if target.backend == "hip" else 0
    most = (target.shared_memory_per_block - _RESERVED_SHARED_BYTES) // stage + in_registers
    stages = min(tiling.num_stages, most, 2 if target.backend == "hip" else 8)
    return replace(tiling, num_stages=stages) if stages >= 2 else None
