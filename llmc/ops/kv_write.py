"""llmc::kv_write — put the keys and values of this step's tokens into their slots of the paged cache.

A cache is [blocks, kv_heads, block_size, head_dim], so that one head's keys of one block lie together. Slot s is
row s mod block_size of block s // block_size. With a cache_format the caches hold codes: see cache_codes.py.
"""

from torch import Tensor

from llmc.formats.cache_format import parts_of_pair
from llmc.ops.cache_codes import write_codes
from llmc.ops.registry import FROM_SERVING, op, per_element


def write_slots(values: Tensor, cache: Tensor, slot_mapping: Tensor, cache_format: str | None = None) -> None:
    """cache[slot // block_size, :, slot % block_size] = values[t], cast to the cache's dtype or made into codes.

    values: [tokens, kv_heads, head_dim].
    """
    if cache_format is not None:
        write_codes(values, cache, slot_mapping, cache_format)
        return
    slots = slot_mapping.long()
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = values.to(cache.dtype)


@op(fake=lambda a: None, stages=FROM_SERVING, flops=per_element(0), writes=("k_cache", "v_cache"))
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, cache_format: str | None = None
) -> None:
    """Write k, v: [tokens, kv_heads, head_dim] at slot_mapping: [tokens], int32, into both caches, in place."""
    keys, values = parts_of_pair(cache_format)
    write_slots(k, k_cache, slot_mapping, keys)
    write_slots(v, v_cache, slot_mapping, values)
