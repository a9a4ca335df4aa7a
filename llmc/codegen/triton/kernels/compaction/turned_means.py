"""The weights of a key's parts in llmc::score_expected: mean queries, turned to the positions of later queries.

    w[f] = q̄[f] · g[f],   g[f] = mean of exp(i ω[f] (t + δ)) over the distances δ = 1, 2, 4, … 65536

Angles are products in fp64, cut to a turn as integers: in fp32 an angle of 65536 positions is off by 0.004.
"""

import math

import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.compaction.key_channels import CHANNELS
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.program.launch_arguments import Operand

# As in llmc/ops/score_expected.py, and the power of two above it.
_POWERS = tl.constexpr(17)
_POWER_TILE = tl.constexpr(32)
# A turn has 2³² parts.
_PER_RADIAN = tl.constexpr(2**32 / (2 * math.pi))
_RADIANS = tl.constexpr(2 * math.pi / 2**32)


@triton.jit
def turned_means_kernel(
    compaction_ptr: tl.tensor,
    means_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Program (i, h): the i-th CHANNELS lanes of query head h. Grid: (tiles, query heads).

    means, weights: [query heads, HEAD_DIM + HALF].
    """
    lane = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first, second = lane_channels(lane, HALF, INTERLEAVED)
    is_pair = lane < HALF
    power = tl.arange(0, _POWER_TILE)
    later = tl.load(compaction_ptr + 3) + (1 << power)
    inv_freq = tl.load(inv_freq_ptr + lane, mask=is_pair, other=0.0)
    turns = later.to(tl.float64)[None, :] * (inv_freq.to(tl.float64) * _PER_RADIAN)[:, None]
    angle = (turns.to(tl.int64) & 0xFFFFFFFF).to(tl.float32) * _RADIANS
    is_later = (power < _POWERS)[None, :]
    cos = tl.sum(tl.where(is_later, tl.cos(angle), 0.0), 1) / _POWERS
    sin = tl.sum(tl.where(is_later, tl.sin(angle), 0.0), 1) / _POWERS
    row = tl.program_id(1) * (HEAD_DIM + HALF)
    means_ptr += row
    weights_ptr += row
    x = tl.load(means_ptr + first, mask=first < HEAD_DIM, other=0.0)
    y = tl.load(means_ptr + second, mask=second < HEAD_DIM, other=0.0)
    tl.store(weights_ptr + first, tl.where(is_pair, x * cos - y * sin, x), mask=first < HEAD_DIM)
    tl.store(weights_ptr + second, tl.where(is_pair, x * sin + y * cos, y), mask=second < HEAD_DIM)
    size = tl.load(means_ptr + HEAD_DIM + lane, mask=is_pair, other=0.0)
    tl.store(weights_ptr + HEAD_DIM + lane, size, mask=is_pair)


@triton.jit
def lane_channels(lane: tl.tensor, HALF: tl.constexpr, INTERLEAVED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Both channels of lanes: a pair that positions rotate, or from HALF on two neighbours behind the pairs."""
    if INTERLEAVED:
        return lane * 2, lane * 2 + 1
    return tl.where(lane < HALF, lane, lane * 2), tl.where(lane < HALF, lane + HALF, lane * 2 + 1)


def turn_means(call: Call, weights: Operand) -> DeviceLaunch:
    """The launch, for an op with `compaction`, `means` and `inv_freq`. weights: where it leaves them."""
    (heads, width), (half,) = call.shape("means"), call.shape("inv_freq")
    return DeviceLaunch(
        turned_means_kernel,
        {
            "compaction_ptr": call.vector("compaction"),
            "means_ptr": call.vector("means"),
            "inv_freq_ptr": call.vector("inv_freq"),
            "weights_ptr": weights,
        },
        {"HEAD_DIM": width - half, "HALF": half, "INTERLEAVED": call.plain("interleaved")},
        (str(triton.cdiv(width - half, 2 * int(CHANNELS.value))), str(heads)),
        num_warps=4,
    )


turned_means_budget = Budget("turned_means_kernel")
