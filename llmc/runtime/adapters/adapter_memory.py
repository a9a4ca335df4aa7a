"""The pools of a CPU engine: room for adapters of the largest rank. Only written parts take memory."""

from typing import Any

import numpy as np

from llmc.program import AdapterPools
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.memory import zeros

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32}


class AdapterMemory:
    """A, B and ranks of every adapted product, read by the engine only."""

    def __init__(self, pools: AdapterPools) -> None:
        self._memory, dtypes = {name: zeros(nbytes) for name, nbytes in pools.nbytes().items()}, pools.dtypes()
        self._pools = [
            tuple(self._memory[name].view(_DTYPES[dtypes[name]]).reshape(shape) for name, shape in of_product.items())
            for of_product in map(pools.shapes, range(len(pools.products)))
        ]

    def addresses(self) -> list[int]:
        """Addresses of all pools, in the order of AdapterPools.names."""
        return [memory.ctypes.data for memory in self._memory.values()]

    def put(self, slot: int, adapter: PlacedAdapter) -> None:
        """Write an adapter into a slot, replacing its contents."""
        adapter.put(self._pools, slot, lambda values: values)
