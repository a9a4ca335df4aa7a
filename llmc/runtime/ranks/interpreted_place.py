"""Ranks whose kernels are interpreted: their memory is a part of shared memory, and gloo is the collective library."""

import numpy as np
import torch.distributed as distributed
from torch.distributed.distributed_c10d import Store

from llmc.program.rank_memory import LOST_WORD, memory_bytes
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.memory import Bytes
from llmc.runtime.ranks.device_ranks import part_from_group, patience, tables_of

_PAGE = 4096


def shared_bytes(ranks: int) -> int:
    """Bytes of the memory that the ranks of a stage share: a page with the flags of lost ranks, then the memory of each
    rank."""
    return _PAGE + ranks * memory_bytes(ranks)


def meet_interpreted(rank: int, ranks: int, store: Store, shared: Bytes) -> DevicePlace:
    """Connect to all other ranks of a stage. They call this together."""
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience())
    starts = [_PAGE + index * memory_bytes(ranks) for index in range(ranks)]

    def leave() -> None:
        for start in starts:
            shared[start : start + 4 * (LOST_WORD + 1)].view(np.uint32)[LOST_WORD] = 1

    base = shared.ctypes.data
    return DevicePlace(tables_of(rank, [base + start for start in starts]), True, leave, part_from_group, shared)
