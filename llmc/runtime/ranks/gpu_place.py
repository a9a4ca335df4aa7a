"""How the GPUs of a machine meet: a group of torch's, memory that they read of each other, and a test of both.

That a driver says that GPUs can reach each other's memory does not mean that what is written arrives: with some
settings of PCIe and IOMMU it is dropped, and a collective waits for ever, or adds up what was never sent
(vllm#51513). So every rank writes into every other's memory and looks whether it came, before NCCL is asked for
anything, within a time limit; unless all find it whole, neither the kernels nor NCCL use it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from llmc.errors import RankError
from llmc.program.library_collectives import exchange_parts, gather_rows
from llmc.program.rank_memory import LOST_WORD, memory_bytes
from llmc.runtime.device.symmetric_memory import SymmetricMemory, symmetric_memory
from llmc.runtime.ranks.device_place import DevicePlace
from llmc.runtime.ranks.device_ranks import part_from_group, patience, tables_of
from llmc.runtime.ranks.rank_memory import RankMemory

# Of each part of the test. What works takes milliseconds, NCCL's first call some seconds.
_MEMORY_SECONDS, _LIBRARY_SECONDS = 10.0, 60.0
_TURN_SECONDS = 0.01
# Words that nothing uses yet, and what is written there.
_TESTED, _PATTERN = 64, 0x5A5A0000


def meet_gpus(rank: int, ranks: int, store: Store, memory: RankMemory) -> DevicePlace:
    """With all others at once, on torch's current device. Raises RankError for a library that does not answer."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Without device_id, so that NCCL begins with its first call, after the memory was tested.
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks, timeout=patience())
    host = distributed.new_group(backend="gloo")
    assert isinstance(host, distributed.ProcessGroup)
    found = symmetric_memory(memory_bytes(ranks), device)
    has_memory = _all(found is not None, host) and found is not None and _arrives(found, rank, ranks, host)
    if not has_memory:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    _check_library(rank, ranks, device)
    used = found if has_memory else None
    addresses = [0] * ranks if used is None else list(used.addresses)
    lost = None if used is None else used.own[4 * LOST_WORD : 4 * (LOST_WORD + 1)].view(torch.int32)
    leave = _leaving(lost, device)

    def part() -> None:
        leave()  # The others may have ended without a word: what is aborted waits for nobody.
        part_from_group()

    return DevicePlace(tables_of(rank, addresses).to(device), has_memory, leave, part, found)


def _arrives(memory: SymmetricMemory, rank: int, ranks: int, host: distributed.ProcessGroup) -> bool:
    """Whether what each rank writes into all others' memory is there when they look; the same answer on all."""
    words = [memory.of_rank(other).view(torch.int32) for other in range(ranks)]
    stream = torch.cuda.Stream(memory.own.device)
    with torch.cuda.stream(stream):
        for other in words:
            other[_TESTED + rank : _TESTED + rank + 1].fill_(_PATTERN + rank)
    if not _all(_finished(stream, _MEMORY_SECONDS), host):
        return False
    with torch.cuda.stream(stream):
        own = words[rank][_TESTED : _TESTED + ranks].clone()
        read = torch.stack([other[_TESTED : _TESTED + ranks] for other in words])
    is_there = _finished(stream, _MEMORY_SECONDS)
    expected = torch.arange(_PATTERN, _PATTERN + ranks, dtype=torch.int32)
    is_there = is_there and bool((own.cpu() == expected).all()) and bool((read.cpu() == expected).all())
    if not _all(is_there, host):
        return False
    memory.own.zero_()
    torch.cuda.synchronize(memory.own.device)
    return _all(True, host)


def _all(mine: bool, host: distributed.ProcessGroup) -> bool:
    """Whether all ranks say so; they wait for each other."""
    said = torch.tensor([int(mine)])
    distributed.all_reduce(said, distributed.ReduceOp.MIN, group=host)
    return bool(said.item())


def _check_library(rank: int, ranks: int, device: torch.device) -> None:
    """Both of the library's functions, so that a graph that captures them finds their communicator ready."""
    x = torch.full((1, ranks), rank, dtype=torch.int32, device=device)
    gathered, parts = (torch.full((ranks * ranks,), -1, dtype=torch.int32, device=device) for _ in range(2))
    stream = torch.cuda.Stream(device)

    def run() -> None:
        with torch.cuda.stream(stream):
            gather_rows(x, x, ranks, gathered, 1, ranks, ranks)
            exchange_parts(x, x, ranks, parts, 1, ranks, ranks)

    problem = _problem_of(run, stream)
    expected = torch.arange(ranks, dtype=torch.int32)
    is_right = problem is None and (gathered.view(ranks, ranks)[:, 0].cpu() == expected).all()
    if not (is_right and (parts[:ranks].cpu() == expected).all()):
        raise RankError(
            f"NCCL {problem or 'gave wrong values'} in its first exchange among {ranks} GPUs",
            at=f"rank {rank} ({torch.cuda.get_device_name(device)})",
            fix="set NCCL_DEBUG=INFO to see what it waits for; NCCL_P2P_DISABLE=1 has it go through the host's memory",
        )


def _problem_of(run: Callable[[], None], stream: torch.cuda.Stream) -> str | None:
    try:
        run()
    except RuntimeError as error:
        return f"failed: {' '.join(str(error).split()):.200}"
    return None if _finished(stream, _LIBRARY_SECONDS) else f"did not answer within {_LIBRARY_SECONDS:g} s"


def _finished(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Whether all that is queued ends in time; asked again and again, since waiting could not be broken off."""
    deadline = time.monotonic() + seconds
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TURN_SECONDS)
    return True


def _leaving(lost: Tensor | None, device: torch.device) -> Callable[[], None]:
    def leave() -> None:
        """Kernels look at the word while they wait; NCCL's are aborted."""
        if lost is not None:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                lost.fill_(1)
        group = distributed.group.WORLD
        if group is not None:
            group._get_backend(device).abort()

    return leave
