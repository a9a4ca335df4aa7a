"""Memory of each GPU that all others can read and write: the one file that uses torch.distributed._symmetric_memory,
which is alpha and may change.

Only these parts are used: empty(…, device=), rendezvous(tensor, group), and buffer_ptrs and get_buffer of its result.
A process can do this once: torch 2.13 keeps the store of the first group of a name, and the default group always has
the same name. Later processes would be awaited in a store that they do not know.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor


@dataclass(frozen=True)
class SymmetricMemory:
    """Memory that all GPUs of an engine can access. own: uint8, zeros. addresses: the address of each rank's memory, as
    this GPU sees it. handle: keeps them mapped."""

    own: Tensor
    addresses: tuple[int, ...]
    handle: Any

    def of_rank(self, rank: int) -> Tensor:
        """Return another rank's memory as a tensor of this GPU."""
        buffer: Tensor = self.handle.get_buffer(rank, self.own.shape, self.own.dtype)
        return buffer


_was_set_up = threading.Event()


def can_have_symmetric_memory() -> bool:
    """Whether this process has not called `symmetric_memory` yet."""
    return not _was_set_up.is_set()


def symmetric_memory(nbytes: int, device: torch.device) -> SymmetricMemory | None:
    """Symmetric memory of the default group's ranks, which must all call this, once per process; None if this torch or
    these GPUs lack it."""
    _was_set_up.set()
    group = distributed.group.WORLD
    assert group is not None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, group)
    except (ImportError, AttributeError, RuntimeError):
        return None
    own.zero_()
    torch.cuda.synchronize(device)
    return SymmetricMemory(own, tuple(handle.buffer_ptrs), handle)
