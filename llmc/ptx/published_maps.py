"""Which tensor maps in global memory a block has made, and which of its warps may use them."""

import numpy as np
import numpy.typing as npt

from llmc.ptx.global_memory import Indices
from llmc.ptx.order import Order


class PublishedMaps:
    """The tensor maps of a team's blocks. A map is written by one warp, acquired by a fence, and used after it."""

    def __init__(self, order: Order, known: dict[tuple[int, int], tuple[int, int] | None] | None = None) -> None:
        self._order = order
        # By row and address: the warp that has acquired the map and in which epoch; None before that.
        self._maps = {} if known is None else known

    def publish(self, addresses: npt.NDArray[np.int64], lanes: Indices) -> None:
        """Record that tensor maps were copied to global memory, and that no warp has acquired them yet."""
        for address, lane in zip(addresses, lanes, strict=True):
            self._maps[int(lane) // self._order.threads, int(address)] = None

    def acquire(self, addresses: npt.NDArray[np.int64], lanes: Indices) -> None:
        """Fences of threads: from now on their warps, and threads that synchronize with them, may use the maps."""
        order = self._order
        for address, lane in zip(addresses, lanes, strict=True):
            row, warp = int(lane) // order.threads, int(lane) % order.threads >> 5
            if (row, int(address)) in self._maps:
                self._maps[row, int(address)] = warp, int(order.now[row, warp])

    def problem(self, address: int, lane: int) -> str | None:
        """Return why a thread may not use the map at an address; None if it may."""
        row, warp = lane // self._order.threads, lane % self._order.threads >> 5
        if (row, address) not in self._maps:
            return f"the block has made no tensor map at {address:#x}"
        acquired = self._maps[row, address]
        if acquired is None:
            return f"the map at {address:#x} was written and no fence.proxy.tensormap has acquired it"
        owner, epoch = acquired
        if owner != warp and epoch > self._order.seen[row, warp, owner]:
            return f"the map at {address:#x} was acquired by warp {owner}, with no barrier behind it"
        return None

    def take(self, rows: Indices, order: Order) -> "PublishedMaps":
        """The maps of some of the blocks."""
        new = {int(row): place for place, row in enumerate(rows)}
        return PublishedMaps(order, {(new[r], a): m for (r, a), m in self._maps.items() if r in new})
