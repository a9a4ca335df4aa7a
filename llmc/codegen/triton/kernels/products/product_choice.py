"""Which way computes a product for how many rows: every way that fits the target, by predicted time."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from llmc.codegen.triton.dependent_launch import releases_next_launch
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, LibraryFunction, rows
from llmc.codegen.triton.kernels.launch_edge import LINE
from llmc.codegen.triton.kernels.products.coded_gemv import code_gemv_kernel
from llmc.codegen.triton.kernels.products.coded_library import sums_dtype
from llmc.codegen.triton.kernels.products.coded_narrow import code_narrow_kernel
from llmc.codegen.triton.kernels.products.coded_tile import code_tile_kernel
from llmc.codegen.triton.kernels.products.coded_ways import NARROW_CHANNELS, code_operands
from llmc.codegen.triton.kernels.products.dense_gemv import gemv_kernel
from llmc.codegen.triton.kernels.products.dense_narrow import narrow_kernel
from llmc.codegen.triton.kernels.products.dense_persistent import persistent_kernel
from llmc.codegen.triton.kernels.products.dense_tile import tile_kernel
from llmc.codegen.triton.kernels.products.dense_ways import (
    needs_finish,
    predicted_seconds,
    tilings,
)
from llmc.codegen.triton.kernels.products.finish_product import finish_product_kernel
from llmc.codegen.triton.kernels.products.product import WITHOUT_MASKS, Codes, Product, most_rows
from llmc.codegen.triton.kernels.products.product_way import MOST_SPLIT_ROWS, Tiling, Way
from llmc.codegen.triton.kernels.products.quantize_tokens import padded_for_tiles
from llmc.codegen.triton.kernels.products.sparse_ways import SPARSE_WAYS
from llmc.program import library_products
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget

# Row counts up to which one choice serves, each judged at its upper end; the last one at four times its lower end.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, None)
_GROUP = 8
# Codes that a thread or a few of them read together in a product of few tokens.
_CHUNK_BYTES = 64
# Outputs of a program that finishes a product, and what it reads in addition to that.
_FINISH_BLOCK = 1024
_FINISHING = (
    *("bias_ptr", "delta_ptr", "delta_row_stride", "adapters_ptr", "residual_ptr", "residual_row_stride"),
    *("y_ptr", "y_row_stride", "tokens", "scale"),
)
# Bytes of W that a program asks the L2 cache for before it waits: a few programs' fill the gap between two launches.
_BYTES_AHEAD, _BULK_ALIGNMENT = 16384, 16
_LIBRARY_MATMUL = LibraryFunction(library_products.matmul)
# By the format of W's and x's codes.
_LIBRARY_OF_CODES = {
    "fp8": LibraryFunction(library_products.fp8_matmul),
    "int8": LibraryFunction(library_products.int8_matmul),
}


def product_launches(product: Product, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """The predicted fastest launch for each range of row counts that a step can have; then the others, to measure."""
    chosen: list[DeviceLaunch] = []
    others: list[DeviceLaunch] = []
    for found in _ranges(product, target):
        fastest, *rest = found.tilings
        chosen.append(_serving(product, target, fastest, found))
        others += [_serving(product, target, tiling, found) for tiling in rest]
    return (*chosen, *others)


@dataclass(frozen=True)
class _Range:
    """Row counts with the same tilings and one fastest; last: None for no end. judged: the count of the predictions."""

    first: int
    last: int | None
    judged: int
    tilings: tuple[Tiling, ...]


def _ranges(product: Product, target: GpuTarget) -> list[_Range]:
    """Ranges are joined only where measuring has the same ways to choose from: few rows keep those made for them."""
    most, found = most_rows(product.call, product.count), list[_Range]()
    first = 1
    for bucket in _BUCKETS:
        last = None if bucket is None or bucket >= most else bucket
        judged = min(most, bucket or 4 * first)
        ordered = _ordered(product, target, judged)
        before = found[-1] if found else None
        if before is not None and before.tilings[0] == ordered[0] and set(before.tilings) == set(ordered):
            found[-1] = _Range(before.first, last, judged, ordered)
        else:
            found.append(_Range(first, last, judged, ordered))
        if last is None:
            return found
        first = last + 1
    raise AssertionError("the last bucket has no end")


def _ordered(product: Product, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    fitting = [t for t in tilings(product, target, tokens) if t.splits == 1 or _tiles(product, t) <= MOST_COUNTERS]
    return tuple(sorted(fitting, key=lambda t: predicted_seconds(product, target, t, tokens)))


def _tiles(product: Product, tiling: Tiling) -> int:
    """Tiles of the largest step whose sums are split."""
    return int(triton.cdiv(product.outputs, tiling.out_block) * triton.cdiv(_split_rows(product), tiling.token_block))


def _split_rows(product: Product) -> int:
    """The most rows whose sums are split. A step may have many more."""
    return min(MOST_SPLIT_ROWS, most_rows(product.call, product.count))


def _serving(product: Product, target: GpuTarget, tiling: Tiling, span: _Range) -> DeviceLaunch:
    before: list[DeviceLaunch] = []
    if product.expansion is not None and tiling.expanded:
        # Its time does not depend on the rows, so the prediction of the product leaves it out.
        moved = product.weight_nbytes + product.expansion.nbytes
        before.append(replace(product.expansion.launch, moved=str(moved)))
        product, tiling = product.expansion.product, replace(tiling, expanded=False)
    if tiling.as_numbers and product.codes is not None and product.codes.as_numbers is not None:
        product, tiling = product.codes.as_numbers, replace(tiling, as_numbers=False)
    seconds, launch = predicted_seconds(product, target, tiling, span.judged), _launch(product, target, tiling)
    if product.norm is not None and not tiling.normed:
        before.append(product.norm.launch)
    if product.codes is not None and product.codes.quantize is not None:
        quantize = product.codes.quantize
        before.append(padded_for_tiles(quantize) if tiling.way is Way.CODED_TILE else quantize)
    group = (*before, replace(launch, then=(), seconds=seconds), *launch.then)
    return replace(group[0], min_tokens=span.first, max_tokens=span.last, then=group[1:])


def _launch(product: Product, target: GpuTarget, tiling: Tiling) -> DeviceLaunch:
    """The product's own launch and what follows it."""
    if tiling.way is Way.LIBRARY:
        return _library(product, tiling)
    if product.codes is not None:
        return _code_launch(product, product.codes, target, tiling)
    out_tiles = triton.cdiv(product.outputs, tiling.out_block)
    token_tiles = f"cdiv({product.count}, {tiling.token_block})"
    constants: dict[str, Constant] = {
        **product.constants,
        "OUT_BLOCK": tiling.out_block,
        "IN_BLOCK": tiling.in_block,
    }
    if tiling.way is Way.DENSE_GEMV:
        constants |= {
            "TOKENS": tiling.token_block,
            "NORMED": tiling.normed,
            "AHEAD": _is_ahead(product, target, tiling),
        }
        constants["LINES_AHEAD"] = 0 if constants["AHEAD"] else _dense_lines(product, target, tiling)
        return _with(gemv_kernel, product, constants, (str(out_tiles),), tiling)
    constants["TOKEN_BLOCK"] = tiling.token_block
    if tiling.way is Way.DENSE_NARROW:
        constants |= {"SPLITS": tiling.splits, "NORMED": tiling.normed}
        constants["LINES_AHEAD"] = _dense_lines(product, target, tiling)
        by_split = (str(out_tiles), token_tiles, str(tiling.splits))
        return _split(product, _with(narrow_kernel, product, constants, by_split, tiling), tiling.splits)
    constants["GROUP"] = _GROUP
    if tiling.way is Way.DENSE_TILE:
        return _with(tile_kernel, product, constants, (f"{token_tiles} * {out_tiles}",), tiling)
    constants["PROGRAMS"] = target.sm_count
    grid = (f"min({target.sm_count}, {token_tiles} * {out_tiles})",)
    return _with(persistent_kernel, product, constants, grid, tiling)


def _is_ahead(product: Product, target: GpuTarget, tiling: Tiling) -> bool:
    """Whether gemv_kernel loads W before it waits: not W in a buffer, which a launch before may still write."""
    is_whole = product.channels % tiling.in_block == 0 and product.channels >= 2 * tiling.in_block
    is_read_early = releases_next_launch(target) and _is_stored(product, "weight_ptr") and product.sparse is None
    return is_read_early and is_whole and tiling.token_block == 1


def _dense_lines(product: Product, target: GpuTarget, tiling: Tiling) -> int:
    blocks = triton.cdiv(product.channels, tiling.splits * tiling.in_block)
    row = product.channels * product.itemsize
    return _lines_ahead(product, target, "weight_ptr", tiling, row, blocks * tiling.in_block * product.itemsize)


def _lines_ahead(product: Product, target: GpuTarget, pointer: str, tiling: Tiling, row: int, part: int) -> int:
    """Return how many lines of each of its rows of W a program asks for before it waits, as a power of two; 0 if there
    is no wait, if a launch may write W, or if rows do not begin at multiples of 16 bytes.

    row: bytes of a row. part: bytes of a row that one of several splits reads, but the last.
    """
    if not releases_next_launch(target) or product.sparse is not None or not _is_stored(product, pointer):
        return 0
    starts = row, *((part,) if tiling.splits > 1 else ())
    shortest = row - (tiling.splits - 1) * part
    lines = min(_BYTES_AHEAD // tiling.out_block, shortest) // LINE
    return 0 if lines < 1 or any(start % _BULK_ALIGNMENT for start in starts) else 1 << lines.bit_length() - 1


def _is_stored(product: Product, pointer: str) -> bool:
    """Whether no launch writes what the parameter points to."""
    weight = product.arguments[pointer]
    return isinstance(weight, Operand) and weight.space == "weight"


def _code_launch(product: Product, codes: Codes, target: GpuTarget, tiling: Tiling) -> DeviceLaunch:
    """The same of a product with a quantized weight."""
    out_tiles = triton.cdiv(product.outputs, tiling.out_block)
    constants: dict[str, Constant] = {**product.constants, "OUT_BLOCK": tiling.out_block}
    row_bytes = product.constants["ROW_BYTES"]
    assert isinstance(row_bytes, int)
    if tiling.way is Way.CODED_GEMV:
        chunk = min(_CHUNK_BYTES, (codes.group or _CHUNK_BYTES * codes.per_byte) // codes.per_byte)
        chunks = max(1, min(tiling.in_block, triton.next_power_of_2(product.channels)) // codes.per_byte // chunk)
        constants |= {"TOKENS": tiling.token_block, "CHUNKS": chunks, "CHUNK_BYTES": chunk}
        constants["LINES_AHEAD"] = _lines_ahead(product, target, "codes_ptr", tiling, row_bytes, row_bytes)
        return _with(code_gemv_kernel, product, constants, (str(out_tiles),), tiling)
    if tiling.way is Way.CODED_NARROW:
        constants |= {"TOKEN_BLOCK": tiling.token_block, "WARPS": tiling.num_warps}
        constants |= {"TURNS": tiling.in_block // NARROW_CHANNELS, "AHEAD": _is_stored(product, "codes_ptr")}
        grid = (str(out_tiles), f"cdiv({product.count}, {tiling.token_block})")
        return _with(code_narrow_kernel, product, constants, grid, tiling)
    constants |= {
        "OPERANDS": code_operands(product, codes, target),
        "TOKEN_BLOCK": tiling.token_block,
        "BYTE_BLOCK": tiling.in_block // codes.per_byte,
        "SPLITS": tiling.splits,
        "GROUP": _GROUP,
    }
    turns = triton.cdiv(triton.cdiv(product.channels, tiling.in_block), tiling.splits)
    part = turns * tiling.in_block // codes.per_byte
    constants["LINES_AHEAD"] = _lines_ahead(product, target, "codes_ptr", tiling, row_bytes, part)
    tiles = f"cdiv({product.count}, {tiling.token_block}) * {out_tiles}"
    whole = _with(code_tile_kernel, product, constants, (tiles, str(tiling.splits)), tiling)
    return _split(product, whole, tiling.splits)


def _with(
    function: Any, product: Product, constants: dict[str, Constant], grid: tuple[str, ...], tiling: Tiling
) -> DeviceLaunch:
    arguments = {**product.arguments, **_x(product, tiling)}
    if tiling.way in SPARSE_WAYS:
        arguments |= WITHOUT_MASKS if product.sparse is None else product.sparse.arguments
    if "NORMED" in constants:
        norm: dict[str, Argument] = {"norm_ptr": None, "eps": 0.0}
        arguments |= product.norm.arguments if product.norm is not None and tiling.normed else norm
    return DeviceLaunch(function, arguments, constants, grid, num_warps=tiling.num_warps, num_stages=tiling.num_stages)


def _x(product: Product, tiling: Tiling) -> dict[str, Argument]:
    """Return the operand from which the kernel reads x: normed, if a launch before it does that."""
    there = product.norm.normed if product.norm is not None and not tiling.normed else product.arguments
    return {name: there[name] for name in ("x_ptr", "x_row_stride")}


def _split(product: Product, whole: DeviceLaunch, splits: int) -> DeviceLaunch:
    """The launch with memory for sums of parts of the channels, if there are several, and for counting programs."""
    if splits == 1:
        return replace(whole, arguments={**whole.arguments, "partials_ptr": None, "arrivals_ptr": None})
    columns = _split_rows(product) * splits * product.weight_rows
    workspace = product.call.workspace(f"partial_sums_{splits}", 1, columns, torch.float32)
    shared: dict[str, Argument] = {"partials_ptr": workspace.pointer, "arrivals_ptr": ARRIVALS}
    return replace(whole, arguments={**whole.arguments, **shared})


def _library(product: Product, tiling: Tiling) -> DeviceLaunch:
    """The library's product, straight into y or into a workspace that a second launch finishes."""
    codes = product.codes
    function, weight = _LIBRARY_MATMUL, "weight_ptr"
    if codes is not None:
        function, weight = _LIBRARY_OF_CODES[codes.format], "codes_ptr"
    y = {name: product.arguments[name] for name in ("y_ptr", "y_row_stride")}
    then: tuple[DeviceLaunch, ...] = ()
    if needs_finish(product, tiling):
        y = rows("y", product.call.workspace("product", product.count, product.weight_rows, sums_dtype(product)))
        computed = {"product_ptr": y["y_ptr"], "product_row_stride": y["y_row_stride"]}
        scales = ("x_scales_ptr", "scales_ptr")
        computed |= {name: None if codes is None else product.arguments[name] for name in scales}
        then = (_finish(product, computed),)
    arguments = {**_x(product, tiling), "weight_ptr": product.arguments[weight], **y}
    arguments |= {"tokens": product.count, "IN": product.channels, "OUT": product.weight_rows}
    return DeviceLaunch(function, arguments, {}, ("1",), then=then)


def _finish(product: Product, computed: dict[str, Argument]) -> DeviceLaunch:
    """The launch that does what follows a library's product."""
    block = min(_FINISH_BLOCK, triton.next_power_of_2(product.outputs))
    constants = {name: product.constants[name] for name in ("OUT", "GATED", "ACTIVATION")}
    return DeviceLaunch(
        finish_product_kernel,
        {**computed, **{name: product.arguments[name] for name in _FINISHING}},
        {**constants, "OUT_BLOCK": block},
        (str(product.count), str(triton.cdiv(product.outputs, block))),
    )
