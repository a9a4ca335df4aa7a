"""Attention of 64 query rows by a group of four warps, with the softmax computed while the matrix units multiply.

A group keeps two products in flight: the scores of the next tile of keys, and the weighted sum of the values of the
tile before. When the scores are there, it turns them into weights while the sum still runs. Tiles come from the rings
of cache_tiles.py. Written in Gluon, for sm_90. Source: Shah et al. 2024, "FlashAttention-3", algorithm 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from llmc.codegen.triton.kernels.attention.attend_keys import LOG2E, first_seen

# Rows of one matrix instruction of four warps.
GROUP_ROWS = gl.constexpr(64)


@gluon.jit
def weighted_values(
    q_tile: gl.shared_memory_descriptor,
    row_sum: gl.tensor,
    row_max: gl.tensor,
    own: gl.tensor,
    first_own: gl.tensor,
    keys: gl.tuple,
    scale: float,
    k_ring: gl.tuple,
    v_ring: gl.tuple,
    turns: gl.shared_memory_descriptor,
    VALUE_DIM: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ALTERNATE: gl.constexpr,
    PART: gl.constexpr,
    SCORES: gl.constexpr,
    VALUES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """The loop over the tiles of keys, without masks where every row sees all of a tile; returns (weighted, row_sum).

    own: where the rows' own keys are. first_own: the first of them in the program.
    """
    start, end, _ = keys
    k_tiles, k_full, k_empty = k_ring
    v_tiles, v_full, _ = v_ring
    mbarrier.wait(k_full.index(0), 0)
    scores = _scores(q_tile, k_tiles.index(0), KEY_TILE, SCORES)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(0))
    weights, row_sum, row_max, _ = _soften(scores, row_sum, row_max, own, start, scale, WINDOW, SOFTCAP, KEY_TILE, True)
    weights = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, VALUES, 2))
    weighted = gl.zeros([GROUP_ROWS, VALUE_DIM], gl.float32, VALUES)
    mbarrier.wait(v_full.index(0), 0)

    count = gl.cdiv(end - start, KEY_TILE)
    all_see_from = first_own * 0 + 1
    all_see_to = gl.maximum((first_own + 1) // KEY_TILE - start // KEY_TILE, 1)
    if WINDOW > 0:
        all_see_from = gl.cdiv(first_seen(end - 1, WINDOW, 0), KEY_TILE) - start // KEY_TILE
        all_see_from = gl.minimum(gl.maximum(all_see_from, 1), all_see_to)
        for turn in range(1, all_see_from):
            weights, weighted, row_sum, row_max = _turn(
                turn, q_tile, weights, weighted, row_sum, row_max, own, start, scale, k_ring, v_ring, turns,
                WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, PART, True,
            )  # fmt: skip
    for turn in range(all_see_from, all_see_to):
        weights, weighted, row_sum, row_max = _turn(
            turn, q_tile, weights, weighted, row_sum, row_max, own, start, scale, k_ring, v_ring, turns,
            WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, PART, False,
        )  # fmt: skip
    for turn in range(all_see_to, count):
        weights, weighted, row_sum, row_max = _turn(
            turn, q_tile, weights, weighted, row_sum, row_max, own, start, scale, k_ring, v_ring, turns,
            WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, PART, True,
        )  # fmt: skip
    weighted = warpgroup_mma(weights, v_tiles.index((count - 1) % STAGES), weighted, is_async=True)
    weighted = warpgroup_mma_wait(0, [weighted])
    return weighted, row_sum


@gluon.jit
def _turn(
    turn: gl.tensor,
    q_tile: gl.shared_memory_descriptor,
    weights: gl.tensor,
    weighted: gl.tensor,
    row_sum: gl.tensor,
    row_max: gl.tensor,
    own: gl.tensor,
    start: gl.tensor,
    scale: float,
    k_ring: gl.tuple,
    v_ring: gl.tuple,
    turns: gl.shared_memory_descriptor,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ALTERNATE: gl.constexpr,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """The softmax of tile `turn`, and the weighted sum of the tile before; returns (weights, weighted, row_sum,
    row_max). The values of both have arrived when it ends."""
    k_tiles, k_full, k_empty = k_ring
    v_tiles, v_full, v_empty = v_ring
    stage, before = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    if ALTERNATE:
        # Group 0 goes first: its wait for turn 1 ends at once.
        mbarrier.wait(turns.index(PART), (turn - 1) & 1 ^ (1 - PART))
    SCORES: gl.constexpr = row_max.type.layout.parent
    scores = _scores(q_tile, k_tiles.index(stage), KEY_TILE, SCORES)
    weighted = warpgroup_mma(weights, v_tiles.index(before), weighted, is_async=True)
    if ALTERNATE:
        mbarrier.arrive(turns.index(1 - PART))
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(stage))
    weights, row_sum, row_max, shrink = _soften(
        scores, row_sum, row_max, own, start + turn * KEY_TILE, scale, WINDOW, SOFTCAP, KEY_TILE, MASKED
    )
    # The compiler moves exponentials behind a wait for products, but not behind this branch.
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    weighted = warpgroup_mma_wait(0, [weighted])
    mbarrier.arrive(v_empty.index(before))
    VALUES: gl.constexpr = weighted.type.layout
    weighted = weighted * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))[:, None]
    weights = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, VALUES, 2))
    return weights, weighted, row_sum, row_max


@gluon.jit
def _scores(
    q_tile: gl.shared_memory_descriptor,
    k_tile: gl.shared_memory_descriptor,
    KEY_TILE: gl.constexpr,
    SCORES: gl.constexpr,
) -> gl.tensor:
    """Queue the product of queries and keys."""
    zeros = gl.zeros([GROUP_ROWS, KEY_TILE], gl.float32, SCORES)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _soften(
    scores: gl.tensor,
    row_sum: gl.tensor,
    row_max: gl.tensor,
    own: gl.tensor,
    tile: gl.tensor,
    scale: float,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    KEY_TILE: gl.constexpr,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Turn the scores of a tile of keys into weights; returns (weights, row_sum, row_max, what older sums shrink to).

    The arithmetic is that of attend_keys.
    """
    exponent_scale = (SOFTCAP if SOFTCAP > 0 else scale) * LOG2E
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both infinities.
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (scale * (2.0 * LOG2E / SOFTCAP))))
    if MASKED:
        keys = tile + gl.arange(0, KEY_TILE, gl.SliceLayout(0, scores.type.layout))
        back = own[:, None] - keys[None, :]
        is_seen = back >= 0
        if WINDOW > 0:
            is_seen = is_seen & (back < WINDOW)
        scores = gl.where(is_seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * exponent_scale)
    weights = gl.exp2(scores * exponent_scale - new_max[:, None])
    shrink = gl.exp2(row_max - new_max)
    return weights, row_sum * shrink + gl.sum(weights, 1), new_max, shrink
