"""Lost ranks, as an executor with a team of ranks reports them until it starts the team again."""

from collections.abc import Callable

from llmc.errors import RankError
from llmc.runtime.ranks.team import Team


class Losses:
    """The part of ReopeningExecutor that reports a lost rank; a base class. Subclasses set `_team`, which calls
    `_tell_lost`."""

    _team: Team
    _lost_told: Callable[[], None] | None = None

    @property
    def lost(self) -> RankError | None:
        """The error, once a rank is lost."""
        return self._team.error() if self._team.is_lost.is_set() else None

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Set a function that another thread calls when a rank is lost."""
        self._lost_told = tell
        if self._team.is_lost.is_set():
            tell()

    def _tell_lost(self) -> None:
        if self._lost_told is not None:
            self._lost_told()
