"""llmc::turn_rows — move the latest rows of a request's cache up, and turn their keys back to their new positions.

Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks".
"""

import torch
from torch import Tensor

from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.ops.compact_kv import Compaction
from llmc.ops.kv_write import write_slots
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.rope import rotate
from llmc.ops.score_keys import stored_rows
from llmc.program.program import CacheSlot
from llmc.program.slot_views import cache_views, move_slots


@op(fake=lambda a: None, stages=FROM_SERVING, flops=per_element(0), writes=("k_cache", "v_cache"))
def turn_rows(
    k_cache: Tensor,
    v_cache: Tensor,
    compaction: Tensor,
    inv_freq: Tensor,
    interleaved: bool,
    sinks: int,
    head_dim: int,
    value_dim: int,
    cache_format: str | None = None,
) -> None:
    """Move the last rows up to after the first `sinks`, and turn their keys back by the rows that they pass.

    k_cache, v_cache: the caches, as for kv_write; keys are rotated as by llmc::rope with angles of inv_freq, [rotary /
    2]. Values, and the first rows, are copied as they are stored. compaction: the compaction, as for compact_kv,
    without queries.
    """
    if not len(compaction):
        return
    heads, block_size = k_cache.shape[1:3]
    sequence = Compaction.of(compaction, block_size)
    shift, kept = sequence.rows - sequence.kept, torch.arange(sequence.kept)
    rows = torch.where(kept < sinks, kept, kept + shift)
    sources = sequence.blocks[rows // block_size] * block_size + rows % block_size
    slots = sequence.places[kept // block_size] * block_size + kept % block_size
    keys = stored_rows(k_cache, sequence, head_dim, cache_format)[rows[sinks:]].float()
    for cache, part in ((k_cache, "k"), (v_cache, "v")):
        slot = CacheSlot(heads, head_dim, value_dim, DTYPE_NAMES[cache.dtype], cache_format)
        move_slots(cache_views(slot, part, cache.view(torch.uint8), block_size), sources, slots)
    angles = (torch.tensor([-shift]).float()[:, None] * inv_freq.float()).expand(len(keys), -1)
    write_slots(rotate(keys, angles.cos(), angles.sin(), interleaved), k_cache, slots[sinks:], cache_format)
