"""Start the other ranks of an engine as processes of this machine, which share memory with this one."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from llmc.engine_format import EngineDirectory
from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import worker_command, worker_environment
from llmc.program import RankLayout
from llmc.runtime.ranks.channel import Channel, SharedMemory
from llmc.runtime.ranks.greeting import Greeting
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.step_rows import StepRows
from llmc.runtime.ranks.team import Member, Team, await_message, end
from llmc.settings import settings

WORKER = "llmc.runtime.ranks.worker"


def start_ranks(engine: EngineDirectory, plan: RankPlan, tell_lost: Callable[[], None]) -> Team:
    """Start all ranks except the first, whose plan is given; the others get the same. tell_lost: as in Team. Raises
    RankError for a rank that does not start or has another engine; no process is then left behind."""
    layout = MemoryLayout.of(engine, plan.exchange_bytes)
    shared = SharedMemory.create(layout.nbytes)
    seconds = settings().rank_start_seconds
    members: list[Member] = []
    memory = RankMemory(shared.bytes, layout)
    try:
        with _hops(layout.ranks) as hops:
            for rank in range(1, plan.ranks):
                members.append(_start(engine, rank, shared, hops[rank]))
            before, behind = (None if end is None else Channel(end.dup()) for end in hops[0])
        rows = StepRows.between(memory, 0, before, behind)
        own = Greeting.of(engine)
        for member in members:
            own.check(await_message(member, seconds), member.name)
            member.channel.send(asdict(replace(plan, rank=member.rank)))
        for member in members:
            await_message(member, seconds)
        return Team(members, shared, memory, memory.place(0), rows, tell_lost)
    except BaseException:
        end(members)
        shared.close()
        raise


Ends = tuple[socket.socket | None, socket.socket | None]


@contextmanager
def _hops(layout: RankLayout) -> Iterator[list[Ends]]:
    """Each rank's ends of the connections to the ranks that it receives rows from and sends rows to. They are closed
    here in the end: each rank has its own then."""
    pairs = {rank: socket.socketpair() for rank in range(layout.ranks) if layout.behind(rank) is not None}
    try:
        ends: list[Ends] = []
        for rank in range(layout.ranks):
            before = layout.before(rank)
            ends.append((None if before is None else pairs[before][1], pairs[rank][0] if rank in pairs else None))
        yield ends
    finally:
        for pair in pairs.values():
            for socket_ in pair:
                socket_.close()


def _start(engine: EngineDirectory, rank: int, memory: SharedMemory, hops: Ends) -> Member:
    own, theirs = socket.socketpair()
    lifeline = Lifeline()
    numbers = (memory.descriptor, len(memory.bytes), theirs.fileno(), lifeline.worker_end)
    neighbours = [hop.fileno() for hop in hops if hop is not None]
    try:
        process = subprocess.Popen(
            worker_command(
                WORKER,
                str(engine.path),
                *map(str, numbers),
                *("" if hop is None else str(hop.fileno()) for hop in hops),
            ),
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(memory.descriptor, theirs.fileno(), lifeline.worker_end, *neighbours),
            process_group=0,
        )
    finally:
        lifeline.started()
        theirs.close()
    return Member(rank, f"rank {rank} (process {process.pid})", Channel(own), process, lifeline)
