"""A bounded set of captured steps: made at a shape's second use, the one used longest ago is dropped first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


class GraphCache(Generic[Key, Graph]):
    """Keeps at most `limit` graphs, and records no more once `room()` is False because memory is short.

    The first use of a key gives none: a step that comes once is not worth a capture, and running it without loads
    what a capture must find loaded.
    """

    def __init__(self, limit: int, room: Callable[[], bool]) -> None:
        self._limit, self._room = limit, room
        self._seen: set[Key] = set()
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Key, capture: Callable[[Key], Graph]) -> Graph | None:
        """The key's graph, captured now if it is due; None if the step has to run without one."""
        known = self._graphs.get(key)
        if known is not None:
            self._graphs.move_to_end(key)
            return known
        if key not in self._seen:
            self._seen.add(key)
            return None
        if len(self._graphs) >= self._limit or (self._graphs and not self._room()):
            self._graphs.popitem(last=False)
        if not self._room():
            return None
        self._graphs[key] = capture(key)
        return self._graphs[key]

    def clear(self) -> None:
        """Drop all of them, and forget which keys were used."""
        self._graphs.clear()
        self._seen.clear()
