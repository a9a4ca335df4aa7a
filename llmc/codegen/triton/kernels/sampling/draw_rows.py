"""llmc::argmax_rows and llmc::draw_rows: each row's largest score's index, the lowest of equals, and that score.

    score[l, v] = logits[l, v],   or   logits[l, v] / temperature[l] + Gumbel noise:   a draw from the softmax

Memory-bound: reads L·V fp32 logits once. A row is cut into chunks, so that the logits of a single row are read by many
programs; the second launch reads one pair a chunk. Source of the draw: Gumbel 1954.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import RowsCall
from llmc.codegen.triton.kernel import DeviceLaunch, RowsTemplate, named_arguments, rows
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.ops.sampling import GROUP_PLACES, NOISE_GROUP, NOISE_RUN, WINNER_SHIFT
from llmc.program.launch_arguments import Argument, Count, Rows
from llmc.targets import GpuTarget

_CHUNK = 4096
# The maximum tile of join_chunks_kernel.
_MAX_CHUNK_TILE = 4096
_HALF_UNIT = tl.constexpr(2.3283063671e-10)
_SMALL = tl.constexpr(0.015625)
_NOISE_GROUP, _NOISE_RUN = tl.constexpr(NOISE_GROUP), tl.constexpr(NOISE_RUN)
_GROUP_PLACES, _WINNER_SHIFT = tl.constexpr(GROUP_PLACES), tl.constexpr(WINNER_SHIFT)


@triton.jit
def draw_chunks_kernel(
    logits_ptr: tl.tensor,
    logits_row_stride: int,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (c, l) leaves the largest score of chunk c of row l, and where it is. Grid: (CHUNKS, L)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < VOCABULARY
    scores = tl.load(logits_ptr + row * logits_row_stride + index, mask=inside, other=float("-inf"))
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            scores = scores / temperature + token_noise(tl.load(seeds_ptr + row), tl.load(counters_ptr + row), index)
    largest, place = largest_of(scores, inside)
    tl.store(maxima_ptr + row * CHUNKS + chunk, largest)
    tl.store(places_ptr + row * CHUNKS + chunk, chunk * CHUNK + place)


@triton.jit
def join_chunks_kernel(
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    tokens_row_stride: int,
    scores_ptr: tl.tensor,
    scores_row_stride: int,
    CHUNKS: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
) -> None:
    """Program l writes row l's largest score and its index, from those of its chunks in order. Grid: (L)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK_TILE)
    largest, place = tl.full([CHUNK_TILE], float("-inf"), tl.float32), tl.zeros([CHUNK_TILE], tl.int32) + 0x7FFFFFFF
    for start in range(0, CHUNKS, CHUNK_TILE):
        chunk = start + lane
        maxima = tl.load(maxima_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
        places = tl.load(places_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0x7FFFFFFF)
        is_better = (maxima > largest) | ((maxima == largest) & (places < place))
        largest, place = tl.where(is_better, maxima, largest), tl.where(is_better, places, place)
    score = tl.max(largest, 0)
    tl.store(scores_ptr + row * scores_row_stride, score)
    tl.store(tokens_ptr + row * tokens_row_stride, tl.min(tl.where(largest == score, place, 0x7FFFFFFF), 0))


@triton.jit
def largest_of(scores: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest of a vector of scores and its lowest index. NaN counts as infinite; only what is inside counts."""
    scores = tl.where(inside, tl.where(scores != scores, float("inf"), scores), float("-inf"))
    largest, place = tl.max(scores, axis=0, return_indices=True)
    return largest, place


@triton.jit
def token_noise(seed: tl.tensor, counter: tl.tensor, token: tl.tensor) -> tl.tensor:
    """llmc.ops.sampling.token_noise, of a vector of tokens."""
    key = (counter.to(tl.int64) << 32) | (seed.to(tl.int64) & 0xFFFFFFFF)
    group, place = token // _NOISE_GROUP, token % _NOISE_GROUP
    number, winner, _, _ = tl.randint4x(key, group + _GROUP_PLACES)
    first = _waiting_time(number) * (1.0 / _NOISE_GROUP)
    a, b, c, d = tl.randint4x(key, group * _NOISE_RUN + place % _NOISE_RUN)
    word = place // _NOISE_RUN
    own = _waiting_time(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))
    is_winner = place == (winner.to(tl.uint32, bitcast=True) >> _WINNER_SHIFT).to(tl.int32)
    return -tl.log(tl.where(is_winner, first, first + own))


@triton.jit
def _waiting_time(word: tl.tensor) -> tl.tensor:
    """llmc.ops.sampling.waiting_time, of a random word."""
    v = tl.uint_to_uniform_float(word) + _HALF_UNIT
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return tl.where(v < _SMALL, series, -tl.log(1.0 - v))


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """logits: [rows, vocabulary], fp32."""
    logits = tensors_of(node)["logits"]
    if logits.dtype is not torch.float32:
        return Refusal(f"logits are {logits.dtype}; the kernel compares float32", node)
    return refuse_ranks(node, logits=(2,))


def argmax_candidates(call: RowsCall, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: a launch over chunks, then one over their maxima."""
    return (_launch(call, temperature_ptr=None, seeds_ptr=None, counters_ptr=None),)


def draw_candidates(call: RowsCall, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """The same, with noise."""
    return (_launch(call),)


def _launch(call: RowsCall, **noise: None) -> DeviceLaunch:
    (vocabulary,), count = call.shape("logits"), call.count("logits")
    chunk = min(_CHUNK, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, chunk)
    found: dict[str, Argument] = {}
    for name, dtype in (("maxima", torch.float32), ("places", torch.int32)):
        found[f"{name}_ptr"] = call.workspace(name, count, chunks, dtype).pointer
    return DeviceLaunch(
        draw_chunks_kernel,
        named_arguments(draw_chunks_kernel, call, **noise, **found),
        {"VOCABULARY": vocabulary, "CHUNK": chunk, "CHUNKS": chunks},
        (str(chunks), str(count)),
        num_warps=8,
        then=(join_launch(found, rows("tokens", call.result(0)) | rows("scores", call.result(1)), chunks, count),),
    )


def join_launch(
    found: dict[str, Argument], into: dict[str, Argument], chunks: int, count: Count | Rows | int
) -> DeviceLaunch:
    """The launch that joins what chunks left in `maxima_ptr` and `places_ptr`."""
    tile = min(_MAX_CHUNK_TILE, triton.next_power_of_2(chunks))
    constants, num_warps = {"CHUNKS": chunks, "CHUNK_TILE": tile}, 8 if tile > 1024 else 1
    return DeviceLaunch(join_chunks_kernel, {**found, **into}, constants, (str(count),), num_warps=num_warps)


argmax_rows = RowsTemplate(torch.ops.llmc.argmax_rows.default, supports, argmax_candidates)
draw_rows = RowsTemplate(torch.ops.llmc.draw_rows.default, supports, draw_candidates)
