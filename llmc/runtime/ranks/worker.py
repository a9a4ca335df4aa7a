"""`python -m llmc.runtime.ranks.worker`: a rank other than the first, which runs the steps of the first rank's
messages."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import of_rank, read_engine
from llmc.errors import LlmcError
from llmc.processes.lifeline import end_with
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.executors.cpp import ChoosingCppExecutor
from llmc.runtime.ranks.channel import Channel, SharedMemory, copy_rows, taken_choices, taken_step
from llmc.runtime.ranks.greeting import Greeting
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.step_rows import StepRows


def main(arguments: list[str]) -> None:
    """Run a rank with the arguments of local_ranks: the engine, then descriptors and numbers."""
    path = Path(arguments[0])
    descriptor, nbytes, connection, lifeline = map(int, arguments[1:5])
    before, behind = (Channel(socket.socket(fileno=int(argument))) if argument else None for argument in arguments[5:7])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first rank.
    end_with(lifeline)
    channel, shared = Channel(socket.socket(fileno=connection)), SharedMemory(descriptor, nbytes)
    try:
        # The first rank checks the files.
        engine = read_engine(path, check_weights=False)
        channel.send(asdict(Greeting.of(engine)))
        plan = await_plan(channel)
        if plan is None:
            return
        take_cores(plan.rank, plan.ranks)
        memory = RankMemory(shared.bytes, MemoryLayout.of(engine, plan.exchange_bytes))
        if engine.program.kernels:
            from llmc.runtime.ranks.device_worker import work_on_device

            return work_on_device(engine, plan, channel, StepRows.between(memory, plan.rank, before, behind))
        executor = open_rank(engine, plan, plan.threads, memory.place(plan.rank))
    except LlmcError as error:
        channel.send({"problem": f"could not open the engine: {error.problem}"})
        return
    channel.send({})
    serve_steps(executor, channel, StepRows.between(memory, plan.rank, before, behind))


def await_plan(channel: Channel) -> RankPlan | None:
    """The first rank's plan for this one; None if it has ended."""
    message = channel.receive()
    return None if message is None else RankPlan(**message)


def open_rank(engine: EngineDirectory, plan: RankPlan, threads: int, place: LlmcRanks) -> ChoosingCppExecutor:
    """Open the executor with the rank's program and weights. Raises LlmcError."""
    return ChoosingCppExecutor(of_rank(engine, plan.rank), plan.blocks, threads, ranks=place)


def serve_steps(
    executor: ChoosingCppExecutor,
    channel: Channel,
    rows: StepRows,
    fetch: Callable[[memoryview], bool] = lambda memory: True,
) -> bool:
    """Execute messages until the other end is closed; False if a step was aborted because a rank was lost.

    fetch: copies a step's arrays into memory that is not shared; False if the sender is closed.
    """
    memory = rows.memory
    while (message := channel.receive()) is not None:
        if message["do"] == "step":
            arrays = memory.step(message["number"])
            if not fetch(arrays[: message["nbytes"]].data):
                return True
            step, choices = taken_step(message, arrays), taken_choices(message, arrays)
            if choices is None:
                rows.run(executor.run, step, message["number"])
            else:
                executor.run_choosing(step, choices)
            if memory.lost.any():
                return False
        else:
            copy_rows(message, executor)
    return True


def take_cores(index: int, count: int) -> None:
    """Pin this process to an equal part of its cores, so that the ranks of a machine do not displace each other.

    Not for the first rank: its process belongs to the user, and its other threads and engines would also be pinned.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    if own:
        os.sched_setaffinity(0, own)


if __name__ == "__main__":
    main(sys.argv[1:])
