"""Assignment of adapters to slots of the engine's pools. The adapter that has been idle longest is replaced first."""

from llmc.runtime.adapters.placed_adapter import PlacedAdapter


class AdapterSlots:
    """Assigns adapters to `count` slots of the pools. An adapter that a seated request uses keeps its slot."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[PlacedAdapter, int] = {}
        self._holders: dict[PlacedAdapter, int] = {}
        # In the order in which their last requests have left.
        self._idle: dict[PlacedAdapter, None] = {}
        self._writes: list[tuple[int, PlacedAdapter]] = []
        self._lost: set[PlacedAdapter] = set()

    @property
    def held(self) -> int:
        """The number of adapters that running requests use."""
        return len(self._holders)

    def fits(self, adapter: PlacedAdapter) -> bool:
        """Whether a request with this adapter could be seated now."""
        return adapter in self._slots or bool(self._free or self._idle)

    def hold(self, adapter: PlacedAdapter) -> None:
        """Count one more request that uses the adapter, which must fit."""
        if adapter not in self._slots:
            if not self._free:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[adapter] = self._free.pop()
            self._writes.append((slot, adapter))
        self._idle.pop(adapter, None)
        self._holders[adapter] = self._holders.get(adapter, 0) + 1

    def release(self, adapter: PlacedAdapter) -> None:
        """Count one request less that uses the adapter."""
        self._holders[adapter] -= 1
        if not self._holders[adapter]:
            del self._holders[adapter]
            if adapter in self._lost:
                self._lost.remove(adapter)
                self._free.append(self._slots.pop(adapter))
            else:
                self._idle[adapter] = None

    def lose(self, adapter: PlacedAdapter) -> None:
        """Note that an adapter's slot could not be written. It is free when the requests that hold the adapter have
        ended."""
        self._lost.add(adapter)

    def number(self, adapter: PlacedAdapter | None) -> int:
        """The number of an adapter in a step: 0 for none, or 1 + its slot."""
        return 0 if adapter is None else 1 + self._slots[adapter]

    def take_writes(self) -> list[tuple[int, PlacedAdapter]]:
        """The adapters to write into slots before the next step, in order; each is returned once."""
        writes, self._writes = self._writes, []
        return writes
