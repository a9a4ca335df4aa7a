"""The decoding requests: one token per step each, at fixed places, so that a step only processes changes.

A decoding request has read all of its tokens except the last, and every step gives it exactly one more or ends it. It
therefore needs no counters: its progress follows from its tokens, and it fills a block every `block_size` steps, always
in a step with the same number modulo block_size. Requests with the same remainder are a cohort.
"""

from llmc.runtime.requests.request import Request, SampledRequest


class DecodeSet:
    """Steady requests at the places 0, 1, … without gaps; the last one fills the gap of one that leaves.

    entered: requests that have got a place, or whose blocks have been exchanged, since the list was taken.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: list[SampledRequest] = []
        self._cohorts: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._entered: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[SampledRequest]:
        """A copy, by place."""
        return self._requests.copy()

    def cohort(self, number: int) -> dict[Request, None]:
        """The requests whose next token begins a block in the step of that number."""
        return self._cohorts[number % self._block_size]

    def add(self, request: SampledRequest, number: int) -> None:
        """Give a request with one pending token a place; `number` is that of the step that will compute it."""
        own = request.decoding
        own.phase = (number - request.computed) % self._block_size
        self._cohorts[own.phase][request] = None
        own.place = len(self._requests)
        self._requests.append(request)
        self._entered.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out; how much of it is computed must be counted from now on."""
        own = request.decoding
        place, own.place = own.place, None
        assert place is not None
        del self._cohorts[own.phase][request]
        last = self._requests.pop()
        if last is not request:
            self._requests[place] = last
            last.decoding.place = place
            self._entered.append(last)

    def note_exchange(self, request: Request) -> None:
        """The request's blocks are not the old ones and perhaps one more."""
        self._entered.append(request)

    def take_entered(self) -> list[Request]:
        """Return `entered` and clear it. Some requests may have left again."""
        entered, self._entered = self._entered, []
        return entered
