"""Messages of the first rank to the others: JSON over a socket, and the arrays of steps through shared memory."""

import json
import mmap
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from llmc.program import CHOICE_INPUTS
from llmc.runtime.executors.executor import Executor
from llmc.runtime.loop.step import STEP_ARRAYS, Step
from llmc.runtime.memory import Bytes
from llmc.runtime.sampling.row_choice import RowChoices

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64


class Channel:
    """One end of a connection; messages come as they were sent, or not at all."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: object, data: memoryview | bytes = b"") -> None:
        """Send a JSON message.

        data: bytes that follow the message, for `receive_into`. Raises OSError if the other end is closed.
        """
        text = json.dumps(message).encode()
        self.socket.sendall(_LENGTH.pack(len(text)) + text)
        if data:
            self.socket.sendall(data)

    def receive(self) -> Any:
        """Return the next message; None if the other end is closed. Raises OSError, TimeoutError among them."""
        head = self._read(_LENGTH.size)
        text = None if head is None else self._read(_LENGTH.unpack(head)[0])
        return None if text is None else json.loads(text)

    def receive_into(self, memory: memoryview) -> bool:
        """Receive the bytes sent with the last message, filling the memory; False if the other end is closed."""
        done = 0
        while done < len(memory):
            count = self.socket.recv_into(memory[done:])
            if not count:
                return False
            done += count
        return True

    def close(self) -> None:
        """The other end receives None."""
        self.socket.close()

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                return None
            data += part
        return bytes(data)


class SharedMemory:
    """Memory without a name, so that nothing is left of it when the last process that has it ends."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, nbytes)
        self.bytes = np.frombuffer(self._mapped, np.uint8)

    @staticmethod
    def create(nbytes: int) -> "SharedMemory":
        """Zeros, for this process and for those that are given the descriptor."""
        descriptor = os.memfd_create("llmc-ranks", os.MFD_CLOEXEC)
        os.truncate(descriptor, nbytes)
        return SharedMemory(descriptor, nbytes)

    def close(self) -> None:
        """The descriptor; the memory goes with this object."""
        os.close(self.descriptor)


def put_step(step: Step, memory: Bytes, choices: RowChoices | None = None) -> dict[str, Any]:
    """Write a step's arrays into memory that has room for them. Returns the message with their places.

    They are its first `nbytes` bytes. choices: the rows' choices, for a step whose tokens all ranks choose.
    """
    places: dict[str, Any] = {}
    start = end = 0
    for name, array in (*step.arrays(), *(() if choices is None else choices.arrays().items())):
        data = np.ascontiguousarray(array)
        memory[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)
        places[name] = [start, data.dtype.str, list(data.shape)]
        end = start + data.nbytes
        start += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    return {"do": "step", "arrays": places, "nbytes": end, "sides": list(step.sides)}


def taken_step(message: dict[str, Any], memory: Bytes) -> Step:
    """The step of a message, with copies of its arrays."""
    return Step(**_taken(STEP_ARRAYS, message, memory), sides=tuple(message["sides"]))


def taken_choices(message: dict[str, Any], memory: Bytes) -> RowChoices | None:
    """Return how all ranks choose the step's tokens; None if the first one has their logits."""
    arrays = _taken(CHOICE_INPUTS, message, memory)
    return RowChoices(**arrays) if arrays else None


def copy_rows(message: dict[str, Any], executor: Executor) -> None:
    """Carry out a message's changes of the cache that do not belong to a step."""
    if message["do"] == "copy_blocks":
        executor.copy_blocks(dict(zip(message["to"], message["from"], strict=True)), message["group"])
    else:
        sources, destinations = (np.array(message[name], np.int32) for name in ("from", "to"))
        executor.move_slots(sources, destinations, message["group"])


def _taken(names: Iterable[str], message: dict[str, Any], memory: Bytes) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name in names:
        if name in message["arrays"]:
            start, dtype, shape = message["arrays"][name]
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[name] = memory[start : start + count].view(dtype).reshape(shape).copy()
    return arrays
