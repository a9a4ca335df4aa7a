"""The place of a GPU engine's rank among the connected ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DevicePlace:
    """A rank's connection to the other ranks' memory. table: [1 + ranks], int64, on the executor's device: this rank's
    number and the address of each one's memory (llmc/program/rank_memory.py). has_memory: whether ranks can read it;
    else all collectives are the library's. leave: called by any thread, has what waits for other ranks end. part:
    called last, so that this process can meet others again. holds: what keeps the memory alive."""

    table: Tensor
    has_memory: bool
    leave: Callable[[], None]
    part: Callable[[], None]
    holds: object
