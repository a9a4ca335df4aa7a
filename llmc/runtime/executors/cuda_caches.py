"""The KV caches and states of an engine on a GPU: copies within the device, to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from llmc.program import Program
from llmc.program.slot_views import move_slots, slot_views
from llmc.runtime.executors.state_memory import copy_slot
from llmc.runtime.loop.step import Ints
from llmc.runtime.memory import Bytes


class CudaCaches:
    """The caches of CudaExecutor; a base class, whose attributes the executor sets.

    _spaces: the memory that each space is in, and at which byte it starts. _group_blocks: number of blocks of each
    group of caches, without the one for padding.
    """

    _program: Program
    _device: torch.device
    _spaces: dict[tuple[str, str], tuple[Tensor, int]]
    _group_blocks: tuple[int, ...]

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        """Copy blocks of a group's keys and values, on the device and in order with the steps."""
        to = torch.tensor(list(copies), device=self._device)
        source = torch.tensor(list(copies.values()), device=self._device)
        for blocks in self._whole_blocks(group):
            blocks.index_copy_(0, to, blocks.index_select(0, source))

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        """Copy rows of a group's keys and values, on the device and in order with the steps."""
        caches = [self._spaces["cache", name][0] for name in self._program.caches_of(group)]
        indices = (torch.from_numpy(slots).long().to(self._device) for slots in (sources, destinations))
        move_slots(slot_views(self._program, caches, group), *indices)

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Copy blocks of a group's keys and values into pinned memory, in order with the steps and concurrently with
        the host."""
        caches = self._whole_blocks(group)
        with torch.cuda.device(self._device):
            places = torch.tensor(list(blocks), device=self._device)
            staged = torch.empty(len(blocks), sum(c.shape[1] for c in caches), dtype=torch.uint8, pin_memory=True)
            begin = 0
            for cache in caches:
                end = begin + cache.shape[1]
                staged[:, begin:end].copy_(cache.index_select(0, places), non_blocking=True)
                begin = end
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> Bytes:
            copied.synchronize()
            octets: Bytes = staged.numpy()
            return octets

        return wait

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        """Fill blocks of a group's keys and values, in order with the steps."""
        rows, begin = torch.from_numpy(np.stack(contents)), 0
        with torch.cuda.device(self._device):
            places = torch.tensor(list(blocks), device=self._device)
            for cache in self._whole_blocks(group):
                end = begin + cache.shape[1]
                cache.index_copy_(0, places, rows[:, begin:end].to(self._device))
                begin = end

    def copy_states(self, source: int, destination: int) -> None:
        """Copy a slot of every state, on the device and in order with the steps."""
        states = (self._spaces["state", name][0] for name in self._program.state_names())
        copy_slot(self._program, states, source, destination)

    def _whole_blocks(self, group: int) -> list[Tensor]:
        """Return each cache of a group as [blocks, bytes], the block for padding the last one."""
        count = self._group_blocks[group] + 1
        return [self._spaces["cache", name][0].view(count, -1) for name in self._program.caches_of(group)]
