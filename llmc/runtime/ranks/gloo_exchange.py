"""Collectives of ranks that share no memory: gloo brings the places of all others into this one's."""

import ctypes
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from llmc.program import RankLayout
from llmc.program.engine_structs import Exchange
from llmc.runtime.ranks.launch import Launch

# Not the functions of torch.distributed, which have one group for the whole process; stubs lack its methods.
_Gloo: Any = torch.distributed.ProcessGroupGloo


class GlooExchange:
    """The function that a step calls for each piece of a collective of a stage's ranks. Each rank receives the values
    of all ranks and sums them in the order of ranks, as with shared memory: the bits are the same.

    failed: called with the reason if ranks lose each other; the step then ends with invalid results.
    """

    def __init__(
        self, store: Store, launch: Launch, layout: RankLayout, seconds: float, failed: Callable[[str], None]
    ) -> None:
        self.function = Exchange(self._exchange)
        self._failed = failed
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=seconds)
        options._devices = [_device(launch)]
        stage = layout.stage_of(launch.rank)
        self._rank, self._ranks = layout.tensor_rank_of(launch.rank), layout.tensor
        self._group: Any = _Gloo(PrefixStore(f"gloo{stage}", store), self._rank, self._ranks, options)

    def close(self) -> None:
        """End gloo's threads. They release Python objects, so a thread that outlives the interpreter aborts the
        process."""
        self._group = None

    def _exchange(self, first: int, stride: int, nbytes: int) -> int:
        group = self._group
        try:
            if group is None:
                raise RuntimeError("the ranks have disconnected")
            places = [_bytes(first + rank * stride, nbytes) for rank in range(self._ranks)]
            group.allgather([places], [places[self._rank]]).wait()
        except RuntimeError as error:  # Exceptions of gloo, including torch's DistError.
            self._failed(" ".join(str(error).split()))
            return 0
        return 1


def own_address(launch: Launch) -> str:
    """Return this machine's address in the network that leads to the first rank's."""
    kind, _, _, _, address = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # Sends nothing.
        own: str = probe.getsockname()[0]
    return own


def _device(launch: Launch) -> Any:
    """Return gloo's network device. By default gloo takes the address of the machine's name, which others often cannot
    reach."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return _Gloo.create_device(interface=interface)
    return _Gloo.create_device(hostname=own_address(launch))


def _bytes(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
