"""Tables that a cache policy cuts, between two steps: when, and the rows that move."""

from collections.abc import Callable, Iterable, Mapping

from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.request_blocks import Cuts, Moves, RequestBlocks


class FullTables:
    """Requests with a table that is to be cut before they go on.

    Args:
        blocks: the tables.
        give_way: takes all blocks of a request, for which there is no room to move its rows.
    """

    def __init__(self, blocks: RequestBlocks, give_way: Callable[[Request], None]) -> None:
        self._blocks, self._give_way = blocks, give_way
        self._noted: list[Request] = []
        self._cuts = Cuts()

    def reach(self, request: Request) -> None:
        """The request has computed more tokens: give back what no later one looks at, and note a full table."""
        if self._blocks.groups:
            self._blocks.retire(request)
            if self._blocks.is_full(request):
                self._noted.append(request)

    def cut(self, beginning: Mapping[Request, None]) -> list[Request]:
        """Cut the full tables of those that were noted and have something to compute.

        Args:
            beginning: requests that decode and begin a block, which are looked at first.

        Returns:
            Requests that decode and whose rows have got other numbers.
        """
        if not self._blocks.groups:
            return []
        for request in beginning:
            self.reach(request)
        noted, self._noted = self._noted, []
        cut = self._cut(request for request in noted if request.standing.is_seated)
        self._blocks.give_back(self._cuts)
        return [request for request in cut if request.decoding.place is not None]

    def take(self) -> tuple[dict[int, Moves], list[list[int]]]:
        """The rows that move before the next step, by group of caches, and those that are chosen."""
        cuts, self._cuts = self._cuts, Cuts()
        return cuts.moves, cuts.compactions

    def _cut(self, requests: Iterable[Request]) -> list[Request]:
        found = list[Request]()
        for request in requests:
            if not self._blocks.is_full(request):
                continue
            if not request.pending:
                self._noted.append(request)
            elif self._blocks.can_cut(request):
                self._blocks.cut(request, self._cuts)
                found.append(request)
            else:
                self._give_way(request)
        return found
