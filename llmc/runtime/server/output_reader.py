"""The interface of readers of a model's output, which turn pieces of text into events."""

from abc import ABC, abstractmethod
from collections.abc import Generator

from llmc.runtime.server.output_events import Event, joined
from llmc.runtime.text.incoming import Incoming


class OutputReader(ABC):
    """A reader of one output. A subclass reads it in the generator `_read`, as if the whole output were there."""

    def __init__(self) -> None:
        self._source = Incoming()
        self._events: list[Event] = []
        self._running = self._read()

    def feed(self, piece: str, *, ended: bool = False, cut: bool = False) -> list[Event]:
        """Return the events that are certain after a piece.

        ended: whether it is the last piece. cut: whether the output ends because it reached a limit.
        """
        self._source.add(piece)
        if ended:
            self._source.end(cut)
        next(self._running, None)
        events, self._events = joined(self._events), []
        return events

    @abstractmethod
    def _read(self) -> Generator[None, None, None]:
        """Emit events up to the end of the output."""

    def _say(self, event: Event) -> None:
        self._events.append(event)
