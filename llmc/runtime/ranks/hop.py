"""From a rank to the one that goes on with its rows: of the next stage, or the first rank, which gets the logits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from llmc.runtime.ranks.channel import Channel

Rows = npt.NDArray[np.float32]


class Giving:
    """The end that gives. shares_memory: rows lie where both see them, and need not be sent."""

    def __init__(self, channel: Channel, *, shares_memory: bool) -> None:
        self._channel, self._shares_memory = channel, shares_memory

    def give(self, slot: int, rows: Rows) -> None:
        """Of the step under way in that slot. Nobody may be there any more: the first rank finds that out."""
        with suppress(OSError):
            self._channel.send(
                [slot, rows.nbytes], b"" if self._shares_memory else rows.reshape(-1).view(np.uint8).data
            )

    def close(self) -> None:
        """The other end is told."""
        self._channel.close()


class Taking:
    """The end that takes. place: of so many bytes of the step in a slot, for rows that are sent.

    Those are read as they come, whatever this rank is doing: who gives never waits for who takes, so no ring of ranks
    can wait for itself. No step uses a slot before the first rank has the results of the one before.
    """

    def __init__(self, channel: Channel, place: Callable[[int, int], memoryview] | None = None) -> None:
        self._channel, self._place = channel, place
        self._slots: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="llmc-rows", daemon=True)
        self._thread.start()

    def take(self, seconds: float | None = None) -> int | None:
        """The slot of the next rows that are there; None where nobody gives any more. Raises TimeoutError."""
        try:
            return self._slots.get(timeout=seconds)
        except Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Take no more."""
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)  # It wakes the thread.
        self._channel.close()

    def _read(self) -> None:
        with suppress(OSError):
            while (message := self._channel.receive()) is not None:
                slot, nbytes = message
                if self._place is not None and not self._channel.receive_into(self._place(slot, nbytes)):
                    break
                self._slots.put(slot)
        self._slots.put(None)
