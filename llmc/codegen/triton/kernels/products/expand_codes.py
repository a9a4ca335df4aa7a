"""A quantized weight's values in x's dtype, written to a workspace by a separate launch, for products of many tokens.

Tiles on the matrix units decode codes once per tile of tokens. With hundreds of tokens, decoding them once and giving
the weight to the library takes less time. Each value is scale · code - minimum in fp32, rounded once to x's dtype.
"""

import math
from dataclasses import replace

import triton
import triton.language as tl

from llmc.codegen.call import CODE_ROW_PARTS
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.products.coded_ways import MOST_NARROW_ROWS, decoding_instructions
from llmc.codegen.triton.kernels.products.format_facts import halves, in_pairs
from llmc.codegen.triton.kernels.products.group_scales import scale_and_minimum, second_group
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.product import Codes, Expansion, Product
from llmc.codegen.triton.kernels.products.product_way import Way
from llmc.codegen.triton.kernels.products.weight_codes import (
    code_values,
    high_codes,
    load_above,
    load_codes,
    low_codes,
)
from llmc.codegen.triton.machine_code.budget import Budget, Limit
from llmc.codegen.triton.machine_code.device_limits import bytes_to_keep_in_flight
from llmc.program.launch_arguments import Operand
from llmc.targets import GpuTarget

# Bytes of low bits of a program, of a row in it at most, and at least where that divides the rows evenly.
_PROGRAM_BYTES, _MOST_BYTES, _LEAST_BYTES = 2048, 1024, 128
# Other kernels for values would be compiled only to be measured.
_WAYS = frozenset({Way.LIBRARY})
# Arguments and constants of kernels for codes that those for values do not have.
_OF_CODES = frozenset({*(f"{name}_ptr" for name in CODE_ROW_PARTS), "x_scales_ptr"})
_OF_CODES |= {"FORMAT", "X_FORMAT", "ROW_BYTES", "GROUPS", "FLOATS", "X_GROUPS"}


@triton.jit
def expand_codes_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    y_ptr: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    PER_GROUP: tl.constexpr,
) -> None:
    """Program (i, j): the j-th CHUNKS chunks of the i-th ROWS of OUT rows. Moves the codes and OUT·IN elements.

    CHUNK_BYTES: of a row's codes, or of their low bits, that share a scale; PER_GROUP chunks do.
    """
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    HALVES: tl.constexpr = halves(FORMAT, IN, GROUPS)
    PLACES: tl.constexpr = (IN + 31) // 32 * 16 if IN_PAIRS else ROW_BYTES
    MASKED: tl.constexpr = PLACES % (CHUNKS * CHUNK_BYTES) != 0 or PLACES * (2 if IN_PAIRS else 1) != IN
    # Rows past the end are the last one once more.
    row = tl.minimum(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), OUT - 1)[:, None, None]
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)[None, :, None]
    place = chunk * CHUNK_BYTES + tl.arange(0, CHUNK_BYTES)[None, None, :]
    inside, is_group = place < PLACES, (row >= 0) & (chunk * CHUNK_BYTES < PLACES)
    codes = load_codes(codes_ptr + row * ROW_BYTES, place, inside, FORMAT, MASKED)
    above = load_above(codes_ptr + row * ROW_BYTES, place, inside, PLACES, FORMAT, MASKED)
    group = chunk // PER_GROUP * (2 if HALVES else 1)
    scale, minimum = scale_and_minimum(
        scales_ptr, minima_ptr, steps_ptr, row, group, is_group, GROUPS, FLOATS, FORMAT, MASKED
    )
    zeros = tl.zeros_like(scale)
    if zeros_ptr is not None:
        zeros = read_tile(zeros_ptr + row * GROUPS + group, is_group, MASKED).to(tl.float32)
    channel = place // 16 * 32 + place % 16 if IN_PAIRS else place
    values = code_values(low_codes(codes, above, FORMAT), zeros, FORMAT) * scale
    if minima_ptr is not None:
        values -= minimum
    _store(y_ptr + row * IN, channel, values, IN, MASKED)
    if IN_PAIRS:
        if HALVES:
            group = second_group(group, IN, GROUPS)
            scale, minimum = scale_and_minimum(
                scales_ptr, minima_ptr, steps_ptr, row, group, is_group, GROUPS, FLOATS, FORMAT, MASKED
            )
            if zeros_ptr is not None:
                zeros = read_tile(zeros_ptr + row * GROUPS + group, is_group, MASKED).to(tl.float32)
        values = code_values(high_codes(codes, above, FORMAT), zeros, FORMAT) * scale
        if minima_ptr is not None:
            values -= minimum
        _store(y_ptr + row * IN, channel + 16, values, IN, MASKED)


@triton.jit
def _store(row_ptr: tl.tensor, channel: tl.tensor, values: tl.tensor, IN: tl.constexpr, MASKED: tl.constexpr) -> None:
    values = values.to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + channel, values, mask=channel < IN)
    else:
        tl.store(row_ptr + channel, values)


def expandable(product: Product) -> Product:
    """The product of codes, with the alternative of reading values that a launch writes before. Unchanged if tokens are
    codes too."""
    codes, call = product.codes, product.call
    if codes is None or codes.x_format != "none":
        return product
    dtype, elements = call.dtype("x"), product.weight_rows * product.channels
    values = call.workspace("expanded", 1, elements, dtype).pointer
    arguments = {name: product.arguments[name] for name in product.arguments if name not in _OF_CODES}
    constants = {name: product.constants[name] for name in product.constants if name not in _OF_CODES}
    whole = replace(product, codes=None, arguments={**arguments, "weight_ptr": values}, constants=constants)
    launch, instructions = _launch(product, codes, values), decoding_instructions(codes.format)
    nbytes = elements * dtype.itemsize
    return replace(product, expansion=Expansion(launch, whole, nbytes, instructions, MOST_NARROW_ROWS + 1, _WAYS))


def _launch(product: Product, codes: Codes, values: Operand) -> DeviceLaunch:
    named = {name: product.constants[name] for name in ("IN", "FORMAT", "ROW_BYTES", "GROUPS", "FLOATS")}
    row_bytes, groups = int(named["ROW_BYTES"] or 0), int(named["GROUPS"] or 1)
    places = row_bytes if codes.per_byte == 1 else -(-product.channels // 32) * 16
    width = math.gcd(places, _MOST_BYTES)
    if width < _LEAST_BYTES:
        width = min(_MOST_BYTES, triton.next_power_of_2(places))
    # All chunks of a row are of its only group, or several chunks are of each group.
    group = places if groups == 1 else (codes.group or 0) // codes.per_byte
    chunk = width if groups == 1 else min(width, group)
    rows = min(_PROGRAM_BYTES // width, triton.next_power_of_2(product.weight_rows))
    tile = {"ROWS": rows, "CHUNKS": width // chunk, "CHUNK_BYTES": chunk, "PER_GROUP": triton.cdiv(group, chunk)}
    stored = {f"{name}_ptr": product.arguments[f"{name}_ptr"] for name in CODE_ROW_PARTS}
    return DeviceLaunch(
        expand_codes_kernel,
        {**stored, "y_ptr": values},
        {**named, "OUT": product.weight_rows, **tile},
        (str(triton.cdiv(product.weight_rows, rows)), str(triton.cdiv(places, width))),
    )


def _codes_in_flight(target: GpuTarget) -> float:
    """Return the bytes of codes to keep in flight: a third, because no thread waits for the bytes that are written."""
    return bytes_to_keep_in_flight(target) / 3


expand_codes_budget = Budget(
    "expand_codes_kernel",
    (
        Limit("narrow_loads", "a load of 16 bytes per thread takes as long as a narrower one", at_most=0),
        Limit("bytes_in_flight", "the memory is idle while codes arrive", at_least=_codes_in_flight),
    ),
    streams=("codes_ptr",),
)
