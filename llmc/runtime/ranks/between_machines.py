"""Ranks that torchrun has started, on one machine or several: how the first finds all others, and they it.

They find each other through torch's store, where the first rank publishes its port. Its messages and the arrays of each
step go over TCP, and collectives over gloo (gloo_exchange.py).
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from llmc.engine_format import EngineDirectory
from llmc.errors import RankError
from llmc.runtime.memory import zeros
from llmc.runtime.ranks.channel import Channel, SharedMemory
from llmc.runtime.ranks.gloo_exchange import GlooExchange, own_address
from llmc.runtime.ranks.greeting import Greeting
from llmc.runtime.ranks.launch import Launch
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.row_connections import connect_neighbours
from llmc.runtime.ranks.step_rows import StepRows
from llmc.runtime.ranks.team import Member, Team, await_message, end
from llmc.runtime.ranks.worker import await_plan, open_rank, serve_steps, take_cores
from llmc.settings import settings

_GREETING_SECONDS = 10.0


def gather_ranks(engine: EngineDirectory, plan: RankPlan, launch: Launch, tell_lost: Callable[[], None]) -> Team:
    """Connect all ranks except this one, the first, whose plan is given. tell_lost: as in Team. Raises RankError for
    those that do not come or do not fit."""
    launch.check(plan.ranks)
    layout = MemoryLayout.of(engine, plan.exchange_bytes)
    shared = SharedMemory.create(layout.nbytes)
    memory = RankMemory(shared.bytes, layout)
    members: list[Member] = []
    try:
        with meeting(launch) as store:
            _await_all(store, launch, Greeting.of(engine), members)
            for member in members:
                member.channel.send(asdict(replace(plan, rank=member.rank)))
            exchange = GlooExchange(
                store, launch, layout.ranks, settings().rank_stall_seconds, lambda _: mark_lost(memory)
            )
            hops = connect_neighbours(store, launch, layout.ranks)
            for member in members:
                await_message(member, settings().rank_start_seconds)
        place = memory.place(0)
        place.exchange = exchange.function
        rows = StepRows.between(memory, 0, *hops, is_shared=False)
        return Team(members, shared, memory, place, rows, tell_lost, exchange.close)
    except BaseException:
        end(members)
        shared.close()
        raise


def join_ranks(engine: EngineDirectory, launch: Launch, threads: int) -> None:
    """Be a rank but the first, until that one closes its engine. Raises RankError."""
    launch.check(engine.program.layout.ranks)
    with meeting(launch) as store:
        channel = _connect(store, launch, engine)
        plan = await_plan(channel)
        if plan is None:
            raise RankError("the first rank ended before all ranks had started", at="rank 0", fix="see its output")
        layout = MemoryLayout.of(engine, plan.exchange_bytes)
        memory = RankMemory(zeros(layout.nbytes), layout)
        why = ["the first rank is lost"]

        def failed(reason: str) -> None:
            why[:] = [reason]
            mark_lost(memory)

        exchange = GlooExchange(store, launch, layout.ranks, settings().rank_stall_seconds, failed)
        hops = connect_neighbours(store, launch, layout.ranks)
    place = memory.place(launch.rank)
    place.exchange = exchange.function
    take_cores(launch.local_rank, launch.local_ranks)
    executor = open_rank(engine, plan, max(1, threads // launch.local_ranks), place)
    channel.send({})
    rows = StepRows.between(memory, launch.rank, *hops, is_shared=False)
    is_told_to_end = serve_steps(executor, channel, rows, channel.receive_into)
    exchange.close()
    if not is_told_to_end:
        channel.send({"gave_up": why[0]})
        raise RankError(
            f"rank {launch.rank} lost its connection to the others: {why[0]}", at="the engine's ranks", fix=_SEE_FIRST
        )


@contextmanager
def meeting(launch: Launch) -> Iterator[Store]:
    """The store through which all ranks find each other. Failures of the store or of gloo are raised as RankError."""
    try:
        yield PrefixStore("llmc", _store(launch, settings().rank_start_seconds))
    except (torch.distributed.DistError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        in_use = "EADDRINUSE" in text or "address already in use" in text
        raise RankError(
            f"port {launch.port} is in use" if in_use else f"rank {launch.rank} could not meet the others: {text:.300}",
            at=f"{launch.address}:{launch.port}",
            fix="give torchrun another --master-port"
            if in_use
            else "look whether all ranks run and reach that address",
        ) from None


def mark_lost(memory: RankMemory) -> None:
    """Make this process's step leave its collectives."""
    memory.lost[:] = 1


_SEE_FIRST = "see the output of the first rank"


def _store(launch: Launch, seconds: float) -> Store:
    """The store at the place of torch's env://, in torchrun's own process or in the first rank. Unlike torch, it does
    not wait for the other ranks; the first rank waits later, when it can tell which are missing (_await_all)."""
    is_here = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_here:
        _await_port(launch, seconds)
    return TCPStore(
        launch.address,
        launch.port,
        launch.ranks,
        is_master=is_here,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _await_port(launch: Launch, seconds: float) -> None:
    """Wait until the first rank's port accepts connections. A store's client would also wait, but on failure it writes
    a stack trace of its library to stderr."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((launch.address, launch.port), max(0.01, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RankError(
                    f"rank {launch.rank} did not reach the first rank within {seconds:g} seconds: {error}",
                    at=f"{launch.address}:{launch.port}",
                    fix="look whether the first rank runs and that address is its machine's; where starting takes "
                    "longer, set LLMC_RANK_START_SECONDS",
                ) from None
            time.sleep(0.05)
        else:
            return


def _await_all(store: Store, launch: Launch, own: Greeting, members: list[Member]) -> None:
    """Listen until every rank has connected; each is added to the members."""
    seconds = settings().rank_start_seconds
    deadline = time.monotonic() + seconds
    secret = secrets.token_hex(16)
    address = own_address(launch)
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=kind) as listener:
        store.set("first", json.dumps([address, listener.getsockname()[1], secret]))
        while len(members) < launch.ranks - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, launch.ranks)) - {member.rank for member in members})
                raise RankError(
                    f"rank {', '.join(map(str, missing))} of {launch.ranks} did not come up within {seconds:g} seconds",
                    at=f"{launch.address}:{launch.port}",
                    fix="see the output of torchrun on the other machines; if starting takes longer, set "
                    "LLMC_RANK_START_SECONDS",
                ) from None
            member = _greeted(Channel(connection), secret, own)
            if member is not None:
                members.append(member)


def _greeted(channel: Channel, secret: str, own: Greeting) -> Member | None:
    """The rank that has connected; None for a stranger. Raises RankError if it has another engine, and notifies it."""
    channel.socket.settimeout(_GREETING_SECONDS)
    keep_alive(channel.socket)
    try:
        message = channel.receive()
        if not isinstance(message, dict) or message.get("secret") != secret:
            channel.close()
            return None
    except (OSError, ValueError):
        channel.close()
        return None
    name = f"rank {message['rank']} (process {message['process']} on {message['host']})"
    try:
        own.check(message, name)
    except RankError:
        channel.close()
        raise
    channel.socket.settimeout(None)
    return Member(message["rank"], name, channel, shares_memory=False)


def _connect(store: Store, launch: Launch, engine: EngineDirectory) -> Channel:
    address, port, secret = json.loads(store.get("first"))
    connection = socket.create_connection((address, port), settings().rank_start_seconds)
    connection.settimeout(None)
    keep_alive(connection)
    channel = Channel(connection)
    identity = {"rank": launch.rank, "process": os.getpid(), "host": socket.gethostname(), "secret": secret}
    channel.send({**asdict(Greeting.of(engine)), **identity})
    return channel


def keep_alive(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute that the other machine is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
