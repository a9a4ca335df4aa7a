"""The requests that hold no blocks: by priority, and in order of arrival."""

from collections import deque
from collections.abc import Iterable

from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request import Request

# How long a FREE request waits until it is as urgent as a PREMIUM one.
_AGEING_SECONDS = 10.0


class WaitingRequests:
    """The requests that wait to start. now: on the clock of Request.arrived; set by callers that need ages."""

    def __init__(self) -> None:
        self.now = 0.0
        self._premium: deque[Request] = deque()
        self._free: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._premium) + len(self._free)

    def add(self, request: Request) -> None:
        """Add a request that has just arrived, as the last."""
        self._queue_of(request).append(request)
        request.standing.is_waiting = True

    def put_back(self, request: Request) -> None:
        """Put a request that arrived earlier back, by order of arrival."""
        request.standing.is_waiting = True
        queue, sequence = self._queue_of(request), request.standing.sequence
        place = next((i for i, other in enumerate(queue) if other.standing.sequence > sequence), len(queue))
        queue.insert(place, request)

    def first(self) -> Request | None:
        """The most urgent one."""
        premium, free = self._premium, self._free
        if premium and free:
            return free[0] if self._has_aged(free[0]) and free[0].arrived < premium[0].arrived else premium[0]
        return premium[0] if premium else free[0] if free else None

    def take(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        queue = self._queue_of(request)
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        request.standing.is_waiting = False

    def is_urgent(self, request: Request) -> bool:
        """Whether a request is urgent, waiting or not."""
        return request.priority is Priority.PREMIUM or self._has_aged(request)

    def by_urgency(self, requests: Iterable[Request]) -> list[Request]:
        """Requests with a single pending token, then the urgent ones, each in order of arrival."""
        found = list(requests)
        if len(found) > 1:
            found.sort(key=lambda r: (r.pending > 1, not self.is_urgent(r), r.standing.sequence))
        return found

    def least_urgent(self, requests: Iterable[Request]) -> Request:
        """The youngest of the least urgent ones."""
        return max(requests, key=lambda r: (not self.is_urgent(r), r.standing.sequence))

    def _queue_of(self, request: Request) -> deque[Request]:
        return self._premium if request.priority is Priority.PREMIUM else self._free

    def _has_aged(self, request: Request) -> bool:
        return self.now - request.arrived >= _AGEING_SECONDS
