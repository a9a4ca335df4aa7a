"""Kernels as Triton's tutorials teach them, written from their formulas: none of llmc's, so that the machine for PTX is
not fitted to those alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_vectors(x_ptr: tl.tensor, y_ptr: tl.tensor, z_ptr: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    """z = x + y."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(z_ptr + place, tl.load(x_ptr + place, mask=inside) + tl.load(y_ptr + place, mask=inside), mask=inside)


@triton.jit
def softmax_rows(x_ptr: tl.tensor, y_ptr: tl.tensor, columns: int, BLOCK: tl.constexpr) -> None:
    """y[i] = exp(x[i] - max x[i]) / Σ exp(x[i] - max x[i]); a row a program."""
    place = tl.arange(0, BLOCK)
    inside = place < columns
    x = tl.load(x_ptr + tl.program_id(0) * columns + place, mask=inside, other=-float("inf"))
    shares = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + tl.program_id(0) * columns + place, shares / tl.sum(shares, axis=0), mask=inside)


@triton.jit
def norm_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    columns: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    """y = (x - mean) / sqrt(variance + eps) · weight + bias, of a row in several blocks."""
    row = tl.program_id(0) * columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row + place, mask=place < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + place, mask=place < columns, other=0.0).to(tl.float32)
        off = tl.where(place < columns, x - mean, 0.0)
        squares += off * off
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < columns
        x = tl.load(x_ptr + row + place, mask=inside, other=0.0).to(tl.float32)
        weight, bias = tl.load(weight_ptr + place, mask=inside), tl.load(bias_ptr + place, mask=inside)
        tl.store(y_ptr + row + place, (x - mean) * scale * weight + bias, mask=inside)


@triton.jit
def multiply(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    M: int,
    N: int,
    K: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """C = A·B in tiles, GROUP rows of tiles one after the other so that B stays in the cache."""
    rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = tl.program_id(0) // (GROUP * columns) * GROUP
    size = min(rows - first, GROUP)
    tile_row = first + tl.program_id(0) % (GROUP * columns) % size
    tile_column = tl.program_id(0) % (GROUP * columns) // size
    row = (tile_row * ROWS + tl.arange(0, ROWS)) % M
    column = (tile_column * COLUMNS + tl.arange(0, COLUMNS)) % N
    depth = tl.arange(0, DEPTH)
    a, b = a_ptr + row[:, None] * K + depth[None, :], b_ptr + depth[:, None] * N + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, K, DEPTH):
        left = tl.load(a, mask=depth[None, :] < K - start, other=0.0)
        right = tl.load(b, mask=depth[:, None] < K - start, other=0.0)
        total = tl.dot(left, right, total)
        a += DEPTH
        b += DEPTH * N
    row, column = tile_row * ROWS + tl.arange(0, ROWS), tile_column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c_ptr + row[:, None] * N + column[None, :], total.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    y_ptr: tl.tensor,
    queries: int,
    keys: int,
    scale: float,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    SPECIALIZED: tl.constexpr,
) -> None:
    """softmax(Q·Kᵀ·scale)·V with the maximum and the sum of each row carried along, through tensor descriptors."""
    q_rows = tl.make_tensor_descriptor(q_ptr, [queries, DIM], [DIM, 1], [ROWS, DIM])
    k_rows = tl.make_tensor_descriptor(k_ptr, [keys, DIM], [DIM, 1], [KEYS, DIM])
    v_rows = tl.make_tensor_descriptor(v_ptr, [keys, DIM], [DIM, 1], [KEYS, DIM])
    y_rows = tl.make_tensor_descriptor(y_ptr, [queries, DIM], [DIM, 1], [ROWS, DIM])
    first = tl.program_id(0) * ROWS
    q = q_rows.load([first, 0])
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(0, keys, KEYS, warp_specialize=SPECIALIZED):
        scores = tl.dot(q, k_rows.load([start, 0]).T) * (scale * 1.4426950408889634)
        scores = tl.where((start + tl.arange(0, KEYS) < keys)[None, :], scores, -float("inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp2(scores - grown[:, None])
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.sum(shares, 1)
        y = tl.dot(shares.to(v_ptr.dtype.element_ty), v_rows.load([start, 0]), y * shrink[:, None])
        largest = grown
    y_rows.store([first, 0], (y / total[:, None]).to(y_ptr.dtype.element_ty))
