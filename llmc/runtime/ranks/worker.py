"""`python -m llmc.runtime.ranks.worker`: a rank but the first, which runs the steps that it is told of."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from llmc.engine_format.reader import of_rank, read_engine
from llmc.errors import LlmcError
from llmc.processes.lifeline import end_with
from llmc.runtime.executors.cpp import CppExecutor
from llmc.runtime.ranks.channel import Channel, SharedMemory, taken_step
from llmc.runtime.ranks.ranked_executor import rank_in


def main(arguments: list[str]) -> None:
    """As ranked_executor starts it: the engine, then numbers."""
    path = Path(arguments[0])
    rank, descriptor, nbytes, exchange_bytes, blocks, threads, connection, lifeline = map(int, arguments[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first rank.
    end_with(lifeline)
    channel, memory = Channel(socket.socket(fileno=connection)), SharedMemory(descriptor, nbytes)
    try:
        # What the files are is checked by the first rank.
        engine = of_rank(read_engine(path, check_weights=False), rank)
        _take_cores(rank, engine.program.ranks)
        executor = CppExecutor(engine, blocks, threads, ranks=rank_in(memory, rank, engine.program.ranks))
    except LlmcError as error:
        channel.send({"problem": f"could not open the engine: {error.problem}"})
        return
    channel.send({})
    serve(executor, channel, memory.bytes[exchange_bytes:])


def serve(executor: CppExecutor, channel: Channel, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Do what is told until the other end is closed."""
    while (message := channel.receive()) is not None:
        if message["do"] == "step":
            executor.step(taken_step(message, memory))
        elif message["do"] == "copy_blocks":
            executor.copy_blocks(dict(zip(message["to"], message["from"], strict=True)))
        else:
            executor.move_slots(*(np.array(message[name], np.int32) for name in ("from", "to")))


def _take_cores(rank: int, ranks: int) -> None:
    """An equal part of this process's, so that ranks do not displace each other."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
    if own:
        os.sched_setaffinity(0, own)


if __name__ == "__main__":
    main(sys.argv[1:])
