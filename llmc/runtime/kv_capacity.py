"""How many blocks the KV cache gets."""

import bisect
from collections.abc import Callable, Sequence

from llmc.errors import OptionError, bad_value
from llmc.program import MAX_SLOTS, Program, state_bytes
from llmc.runtime.memory import available_bytes

# The cache is touched as it fills, so its size is an upper bound; weights, arena and the page cache need memory as
# well.
MEMORY_FRACTION = 0.4


def block_count(
    program: Program,
    kv_cache_bytes: int | None,
    kv_memory: float | None = None,
    beside: Sequence[Program] = (),
    snapshots: int = 0,
) -> int:
    """Number of blocks for all sequences at full length, limited by kv_cache_bytes, or by the share kv_memory of the
    free memory without states and snapshots. beside: programs of engines with the same number of blocks, which share
    the memory.

    The default is 0.4 of the free memory, or more if a single sequence of max_model_len needs it and the free memory
    holds it. Raises OptionError if there is not even room for that.
    """
    limits = program.limits
    available = available_bytes() - (limits.max_sequences + snapshots) * state_bytes(program.states)
    if kv_memory is not None:
        kv_cache_bytes = share_bytes(available, kv_memory, kv_cache_bytes)
    wanted, per_sequence = wanted_blocks(program, kv_cache_bytes)
    needed = cache_bytes(per_sequence, program, beside)
    room = default_bytes(available, needed) if kv_cache_bytes is None else kv_cache_bytes
    blocks = fitting_blocks(wanted, room, lambda count: cache_bytes(count, program, beside))
    if blocks < per_sequence:
        source = "all free memory" if kv_cache_bytes is None else "kv_cache_bytes"
        raise OptionError(
            f"the KV cache gets {room} bytes ({source}), but one sequence of max_model_len={limits.max_model_len} "
            f"tokens needs {needed}",
            at=f"kv_cache_bytes={kv_cache_bytes}",
            fix=f"load with kv_cache_bytes={needed} or more, or build with a smaller max_model_len",
        )
    return blocks


def cache_bytes(blocks: int, program: Program, beside: Sequence[Program] = ()) -> int:
    """Bytes of keys and values on all ranks if group 0 has `blocks` blocks, including the engines of `beside`, whose
    layers all have that number."""
    programs = (program, *(other.with_one_table() for other in beside))
    return sum(member.ranks * sum(member.memories(blocks).values()) for member in programs)


def fitting_blocks(wanted: int, room: int, nbytes: Callable[[int], int]) -> int:
    """The most blocks, at most `wanted`, that take no more bytes than there is room for."""
    return bisect.bisect_right(range(wanted + 1), max(0, room), key=nbytes) - 1


def wanted_blocks(program: Program, kv_cache_bytes: int | None) -> tuple[int, int]:
    """Blocks for every sequence at full length, and for one. Raises OptionError for a bad kv_cache_bytes."""
    limits = program.limits
    if kv_cache_bytes is not None and (type(kv_cache_bytes) is not int or kv_cache_bytes < 1):
        fix = "give a whole number of bytes, or None for a share of the free memory"
        raise bad_value("kv_cache_bytes", kv_cache_bytes, fix)
    per_sequence = limits.blocks_for(limits.max_model_len)
    # One block fewer than there are slots for: a GPU's executor keeps one for padding.
    return min(limits.max_sequences * per_sequence, MAX_SLOTS // limits.block_size - 1), per_sequence


def default_bytes(available: int, one_sequence: int) -> int:
    """Return the share of the available memory that the cache may take, given the need of one sequence of full
    length."""
    return min(available, max(int(MEMORY_FRACTION * available), one_sequence))


def share_bytes(available: int, kv_memory: float, kv_cache_bytes: int | None) -> int:
    """The share `kv_memory` of the available bytes. Raises OptionError if it is out of range, or given together with
    kv_cache_bytes."""
    if kv_cache_bytes is not None:
        raise OptionError(
            f"the KV cache's size is given twice: kv_cache_bytes={kv_cache_bytes} and kv_memory={kv_memory}",
            at="kv_memory",
            fix="give one of them",
        )
    if isinstance(kv_memory, bool) or not isinstance(kv_memory, int | float) or not 0 < kv_memory <= 1:
        raise bad_value("kv_memory", kv_memory, "give a share of the free memory, above 0 and at most 1")
    return max(1, int(available * kv_memory))
