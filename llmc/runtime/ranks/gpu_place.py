"""Connect the GPUs of a machine: a process group of torch, memory that they read from each other, and a test of both.

Shared memory is tested before NCCL is used (arriving_writes.py); unless all find it whole, neither the kernels nor NCCL
use it. Ranks that are started again exchange over NCCL alone, because the first rank's process has had its shared
memory.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch.distributed.distributed_c10d import Store

from llmc.errors import RankError
from llmc.program.library_collectives import exchange_parts, gather_rows
from llmc.program.rank_memory import LOST_WORD, memory_bytes
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.device.symmetric_memory import SymmetricMemory, can_have_symmetric_memory, symmetric_memory
from llmc.runtime.memory import Bytes
from llmc.runtime.ranks.arriving_writes import writes_arrive
from llmc.runtime.ranks.device_ranks import part_from_group, patience, tables_of

# NCCL's first call takes some seconds.
_LIBRARY_SECONDS = 60.0
_TURN_SECONDS = 0.01


def meet_gpus(rank: int, ranks: int, store: Store, shared: Bytes, device: int | None = None) -> DevicePlace:
    """Connect this rank's GPU with those of all other ranks of its stage.

    Args:
        rank: The rank's number in its stage.
        ranks: Number of ranks of the stage.
        store: The store through which they meet.
        shared: Not used, because GPUs share memory of the devices.
        device: Index of the GPU; None for torch's current device, which each thread has for itself.

    Returns:
        The rank's place among the others.

    Raises:
        RankError: NCCL does not answer, or gives wrong values.
    """
    gpu = torch.device("cuda", torch.cuda.current_device() if device is None else device)
    # Without device_id, so that NCCL begins with its first call, after the memory was tested.
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks, timeout=patience())
    host = distributed.new_group(backend="gloo")
    assert isinstance(host, distributed.ProcessGroup)
    is_first = _all(can_have_symmetric_memory(), host)
    symmetric = symmetric_memory(memory_bytes(ranks), gpu) if is_first else None
    has_memory = _all(symmetric is not None, host) and symmetric is not None and _arrives(symmetric, rank, ranks, host)
    if is_first and not has_memory:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    _check_library(rank, ranks, gpu)
    used = symmetric if has_memory else None
    addresses = [0] * ranks if used is None else list(used.addresses)
    lost = None if used is None else used.own[4 * LOST_WORD : 4 * (LOST_WORD + 1)].view(torch.int32)

    def leave() -> None:
        """Kernels look at the word while they wait; NCCL's are aborted."""
        if lost is not None:
            with torch.cuda.stream(torch.cuda.Stream(gpu)):
                lost.fill_(1)
        group = distributed.group.WORLD
        if group is not None:
            group._get_backend(gpu).abort()

    def part() -> None:
        leave()  # The others may have ended unexpectedly: aborting does not wait for them.
        part_from_group()

    return DevicePlace(tables_of(rank, addresses).to(gpu), has_memory, leave, part, symmetric)


def _arrives(memory: SymmetricMemory, rank: int, ranks: int, host: distributed.ProcessGroup) -> bool:
    words = [memory.own if other == rank else memory.of_rank(other) for other in range(ranks)]
    queue = _Stream(torch.cuda.Stream(memory.own.device))
    return writes_arrive([word.view(torch.int32) for word in words], rank, queue, lambda mine: _all(mine, host))


@dataclass(frozen=True)
class _Stream:
    stream: torch.cuda.Stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the work ends within `seconds`. It is polled, because waiting could not be interrupted."""
        deadline = time.monotonic() + seconds
        while not self.stream.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_TURN_SECONDS)
        return True


def _all(mine: bool, host: distributed.ProcessGroup) -> bool:
    """Whether the value is true on all ranks, which wait for each other."""
    vote = torch.tensor([int(mine)])
    distributed.all_reduce(vote, distributed.ReduceOp.MIN, group=host)
    return bool(vote.item())


def _check_library(rank: int, ranks: int, device: torch.device) -> None:
    """Call both of the library's functions, so that a graph that captures them finds their communicator ready."""
    x = torch.full((1, ranks), rank, dtype=torch.int32, device=device)
    gathered, parts = (torch.full((ranks * ranks,), -1, dtype=torch.int32, device=device) for _ in range(2))

    def run() -> None:
        gather_rows(x, x, ranks, gathered, 1, ranks, ranks)
        exchange_parts(x, x, ranks, parts, 1, ranks, ranks)

    problem = _problem_of(run, _Stream(torch.cuda.Stream(device)))
    expected = torch.arange(ranks, dtype=torch.int32)
    is_right = problem is None and (gathered.view(ranks, ranks)[:, 0].cpu() == expected).all()
    if not (is_right and (parts[:ranks].cpu() == expected).all()):
        raise RankError(
            f"NCCL {problem or 'gave wrong values'} in its first exchange among {ranks} GPUs",
            at=f"rank {rank} ({torch.cuda.get_device_name(device)})",
            fix="set NCCL_DEBUG=INFO to see the cause, or NCCL_P2P_DISABLE=1 to exchange through the host's memory",
        )


def _problem_of(run: Callable[[], None], stream: _Stream) -> str | None:
    try:
        stream.run(run)
    except RuntimeError as error:
        return f"failed: {' '.join(str(error).split()):.200}"
    return None if stream.ends_within(_LIBRARY_SECONDS) else f"did not answer within {_LIBRARY_SECONDS:g} s"
