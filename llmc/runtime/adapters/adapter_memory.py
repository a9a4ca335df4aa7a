"""The pools of a CPU engine: room for adapters of the largest rank, of which only what is written takes memory."""

import math
from typing import Any

import numpy as np

from llmc.program import ITEMSIZES, AdapterPools
from llmc.runtime.adapters.placed_adapter import Elements, PlacedAdapter
from llmc.runtime.memory import Bytes, zeros


class AdapterMemory:
    """A, B and ranks of every adapted product, which the engine reads and nobody else."""

    def __init__(self, pools: AdapterPools) -> None:
        self._memory: list[Bytes] = []
        self._a: list[Elements] = []
        self._b: list[Elements] = []
        self._ranks: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
        for index, product in enumerate(pools.products):
            dtype: Any = np.float32 if product.dtype == "F32" else np.uint16
            a, b, ranks = pools.shapes(index).values()
            of_a, of_b = (zeros(math.prod(shape) * ITEMSIZES[product.dtype]) for shape in (a, b))
            of_ranks = zeros(math.prod(ranks) * 4)
            self._memory += [of_a, of_b, of_ranks]
            self._a.append(of_a.view(dtype).reshape(a))
            self._b.append(of_b.view(dtype).reshape(b))
            self._ranks.append(of_ranks.view(np.int32).reshape(ranks))

    def addresses(self) -> list[int]:
        """Of all pools, in the order of AdapterPools.names."""
        return [memory.ctypes.data for memory in self._memory]

    def put(self, slot: int, adapter: PlacedAdapter) -> None:
        """Into a slot, in the place of what was there."""
        for ranks in self._ranks:
            ranks[slot] = 0
        for part in adapter.parts:
            rank, columns = part.b.shape
            self._a[part.product][slot, part.part, :rank] = part.a
            self._b[part.product][slot, :rank, part.begin : part.begin + columns] = part.b
            self._ranks[part.product][slot, part.part] = rank
