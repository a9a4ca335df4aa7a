"""Deadlines of requests. Dropped requests are not referenced any longer."""

import heapq

from llmc.runtime.requests.request import Request


class Deadlines:
    """Requests that have a deadline, until it has passed or they are dropped.

    Most end long before their deadline, which may be a day away. So the heap holds no request, and is rebuilt when
    most of its entries belong to dropped requests.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._requests: dict[tuple[float, int], Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def watch(self, request: Request) -> None:
        """Watch a request; one without a deadline is ignored."""
        if request.deadline is not None:
            key = request.deadline, id(request)
            self._requests[key] = request
            heapq.heappush(self._heap, key)

    def drop(self, request: Request) -> None:
        """Stop watching a request; one that is not watched is ignored."""
        if request.deadline is not None:
            self._requests.pop((request.deadline, id(request)), None)
            if len(self._heap) > 2 * len(self._requests):
                self._heap = sorted(self._requests)

    def passed(self, now: float) -> list[Request]:
        """The requests whose deadline is not after `now`, the earliest first; they are no longer watched."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            # None for one that was dropped; the id may be another's by now, whose deadline is the same then.
            request = self._requests.pop(heapq.heappop(self._heap), None)
            if request is not None:
                found.append(request)
        return found
