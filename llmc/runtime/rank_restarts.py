"""Start the ranks of a served engine again when one was lost, and count how often that was."""

import logging
import time
from collections.abc import Callable, Mapping

from llmc.errors import RankError
from llmc.runtime.executors.executor import Executor, ReopeningExecutor

_log = logging.getLogger("llmc.ranks")


class RankRestarts:
    """Restarts lost ranks of an executor. notify: called by any thread when a rank was lost, also while no step runs.
    It finds `lost` then.

    counts: how often each rank but the first was lost and started again; empty for an engine without others.
    """

    def __init__(self, executor: Executor, notify: Callable[[], None]) -> None:
        self._executor = executor if isinstance(executor, ReopeningExecutor) else None
        self.counts: Mapping[int, int] = {}
        if self._executor is not None:
            self.counts = dict.fromkeys(range(1, self._executor.ranks), 0)
            self._executor.when_lost(notify)

    @property
    def lost(self) -> RankError | None:
        """The error that names the lost rank; None while all ranks run."""
        return None if self._executor is None else self._executor.lost

    def restart(self, ended_requests: int) -> None:
        """Start all ranks again, with empty caches. ended_requests: for the log. Raises RankError if they do not come
        up, or if that is not for this process to do."""
        lost = self.lost
        assert self._executor is not None and lost is not None
        _log.error("%s; %d requests end with an error", lost.problem, ended_requests)
        begin = time.monotonic()
        self._executor.reopen()
        # Others read it meanwhile.
        self.counts = {rank: count + (rank == lost.rank) for rank, count in self.counts.items()}
        _log.warning("the engine's ranks were started again in %.1f s", time.monotonic() - begin)
