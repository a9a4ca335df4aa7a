"""Start the other ranks of an engine as processes of this machine, which share memory with this one."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace

from llmc.engine_format import EngineDirectory
from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import worker_command, worker_environment
from llmc.runtime.ranks.channel import Channel, SharedMemory
from llmc.runtime.ranks.greeting import Greeting
from llmc.runtime.ranks.rank_plan import RankPlan, step_bytes
from llmc.runtime.ranks.team import Member, Team, await_message, end
from llmc.settings import settings

WORKER = "llmc.runtime.ranks.worker"


def start_ranks(engine: EngineDirectory, plan: RankPlan, tell_lost: Callable[[], None]) -> Team:
    """All but the first, whose plan is given; the others get the same. tell_lost: as Team has it. Raises RankError for
    one that does not come up or has another engine, and leaves none behind then."""
    memory = SharedMemory.create(plan.exchange_bytes + step_bytes(engine.program))
    seconds = settings().rank_start_seconds
    members: list[Member] = []
    try:
        for rank in range(1, plan.ranks):
            members.append(_start(engine, rank, memory))
        own = Greeting.of(engine)
        for member in members:
            own.check(await_message(member, seconds), member.name)
            member.channel.send(replace(plan, rank=member.rank).message())
        for member in members:
            await_message(member, seconds)
        return Team(members, memory, plan.exchange_bytes, plan.place(memory), tell_lost)
    except BaseException:
        end(members)
        memory.close()
        raise


def _start(engine: EngineDirectory, rank: int, memory: SharedMemory) -> Member:
    own, theirs = socket.socketpair()
    lifeline = Lifeline()
    numbers = (memory.descriptor, len(memory.bytes), theirs.fileno(), lifeline.worker_end)
    try:
        process = subprocess.Popen(
            worker_command(WORKER, str(engine.path), *map(str, numbers)),
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(memory.descriptor, theirs.fileno(), lifeline.worker_end),
            process_group=0,
        )
    finally:
        lifeline.started()
        theirs.close()
    return Member(rank, f"rank {rank} (process {process.pid})", Channel(own), process, lifeline)
