"""Tables that a cache policy cuts, between two steps: when, and the rows that move."""

from collections.abc import Callable, Iterable, Mapping

from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.request_blocks import Cuts, RequestBlocks
from llmc.runtime.scheduling.step_plan import StepOutline


class FullTables:
    """Requests with a table that is to be cut before they go on.

    Rows move while a step is planned, before anything else happens in it: no step is under way, and no block has
    another holder yet. So a request that is swapped out in the same step has its rows where its tables say.

    Args:
        blocks: the tables.
        give_way: takes all blocks of a request, for which there is no room to move its rows.
        move_rows: moves rows of the caches at once.
    """

    def __init__(
        self,
        blocks: RequestBlocks,
        give_way: Callable[[Request, StepOutline], None],
        move_rows: Callable[[Cuts], None],
    ) -> None:
        self._blocks, self._give_way, self._move_rows = blocks, give_way, move_rows
        self._noted: list[Request] = []

    def reach(self, request: Request) -> None:
        """Release the blocks that no later token of the request reads, and note a full table, after it has computed
        more tokens."""
        if self._blocks.groups:
            self._blocks.retire(request)
            if self._blocks.is_full(request):
                self._noted.append(request)

    def cut(self, beginning: Mapping[Request, None], outline: StepOutline) -> list[Request]:
        """Cut the full tables of those that were noted and have something to compute.

        Args:
            beginning: requests that decode and begin a block, which are examined first.
            outline: the step that is planned.

        Returns:
            Requests that decode and whose rows have got other numbers.
        """
        for request in beginning:
            self.reach(request)
        noted, self._noted = self._noted, []
        if not noted:
            return []
        cuts = Cuts()
        try:
            found = self._cut(noted, cuts, outline)
            self._move_rows(cuts)
        finally:
            self._blocks.give_back(cuts)
        return [request for request in found if request.decoding.place is not None]

    def _cut(self, requests: Iterable[Request], cuts: Cuts, outline: StepOutline) -> list[Request]:
        found = list[Request]()
        for request in requests:
            if not request.standing.is_seated or not self._blocks.is_full(request):
                continue
            self._blocks.begin_reading(request)
            if not request.pending and request.standing.reading is None:
                self._noted.append(request)
            elif self._blocks.can_cut(request):
                self._blocks.cut(request, cuts)
                self._blocks.go_on_reading(request)
                found.append(request)
            else:
                self._give_way(request, outline)
        return found
