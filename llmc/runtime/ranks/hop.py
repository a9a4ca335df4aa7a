"""The transfer of rows from a rank to the next stage's rank, or of logits from the last stage to the first rank."""

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

    def give(self, number: int, rows: Rows) -> None:
        """Send the rows of the step of that number. A closed receiver is ignored, because the first rank detects it."""
        data = b"" if self._shares_memory else rows.reshape(-1).view(np.uint8).data
        with suppress(OSError):
            self._channel.send([number, rows.nbytes], data)

    def close(self) -> None:
        """Close, notifying the other end."""
        self._channel.close()


class Taking:
    """The receiving end. place: returns memory for a number of bytes of a step, for rows that are sent.

    Sent rows are read as they arrive, independent of this rank's work: the sender never waits for the receiver, so a
    ring of ranks cannot deadlock.
    """

    def __init__(self, channel: Channel, place: Callable[[int, int], memoryview] | None = None) -> None:
        self._channel, self._place = channel, place
        self._numbers: SimpleQueue[int | None] = SimpleQueue()
        self._next: int | None = None
        threading.Thread(target=self._read, name="llmc-rows", daemon=True).start()

    def take(self, number: int, seconds: float | None = None) -> bool:
        """Wait until the rows of that step have arrived. False if they will not arrive: the sender is closed, or has
        sent those of later steps. Raises TimeoutError."""
        while self._next is None or self._next < number:
            try:
                self._next = self._numbers.get(timeout=seconds)
            except Empty:
                raise TimeoutError from None
            if self._next is None:
                self._numbers.put(None)
                return False
        return self._next == number

    def close(self) -> None:
        """Stop taking rows."""
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)  # It wakes the thread.
        self._channel.close()

    def _read(self) -> None:
        with suppress(OSError):
            while (message := self._channel.receive()) is not None:
                number, nbytes = message
                if self._place is not None and not self._channel.receive_into(self._place(number, nbytes)):
                    break
                self._numbers.put(number)
        self._numbers.put(None)
