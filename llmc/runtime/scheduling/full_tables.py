"""Tables that a cache policy cuts, between two steps: when, and the rows that move."""

from collections.abc import Callable, Iterable, Mapping

from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.request_blocks import RequestBlocks

# Slots of rows, from and to.
Moves = list[tuple[int, int]]


class FullTables:
    """Requests with a table that is to be cut before they go on.

    Args:
        blocks: the tables.
        give_way: takes all blocks of a request, for which there is no room to move its rows.
    """

    def __init__(self, blocks: RequestBlocks, give_way: Callable[[Request], None]) -> None:
        self._blocks, self._give_way = blocks, give_way
        self._noted: list[Request] = []
        self._moves: dict[int, Moves] = {}

    def reach(self, request: Request) -> None:
        """The request has computed more tokens: give back what no later one looks at, and note a full table."""
        if self._blocks.groups:
            self._blocks.retire(request)
            if self._blocks.is_full(request):
                self._noted.append(request)

    def pass_ends(self, requests: Mapping[Request, None]) -> list[Request]:
        """The requests, which decode, begin a block: the same for each. Returns those whose rows have got other
        numbers."""
        if not self._blocks.groups:
            return []
        for request in requests:
            self._blocks.retire(request)
        return self._cut(list(requests))

    def cut(self) -> None:
        """Cut the tables of those that were noted and have something to compute."""
        noted, self._noted = self._noted, []
        self._cut(request for request in noted if request.standing.is_seated)

    def take_moves(self) -> dict[int, Moves]:
        """The rows that move before the next step, by group of caches; all sources are read first."""
        moves, self._moves = self._moves, {}
        return moves

    def _cut(self, requests: Iterable[Request]) -> list[Request]:
        found = list[Request]()
        for request in requests:
            if not self._blocks.is_full(request):
                continue
            if not request.pending:
                self._noted.append(request)
            elif self._blocks.can_cut(request):
                self._blocks.cut(request, self._moves)
                found.append(request)
            else:
                self._give_way(request)
        return found
