"""How ranks of several machines find the ranks with which they exchange rows: by addresses in the store that all ranks
share."""

import json
import secrets
import socket
import time

from torch.distributed.distributed_c10d import Store

from llmc.errors import RankError
from llmc.program import RankLayout
from llmc.runtime.ranks.channel import Channel
from llmc.runtime.ranks.gloo_exchange import own_address
from llmc.runtime.ranks.launch import Launch
from llmc.settings import settings


def connect_neighbours(store: Store, launch: Launch, layout: RankLayout) -> tuple[Channel | None, Channel | None]:
    """The connections to the rank that this one receives rows from, and to the rank that it sends rows to; None if
    there is none. All ranks call this together. Raises RankError if a neighbour does not connect in time."""
    before, behind = layout.before(launch.rank), layout.behind(launch.rank)
    if before is None:
        return None, _connected(store, behind)
    address, secret = own_address(launch), secrets.token_hex(16)
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        store.set(f"rows{launch.rank}", json.dumps([address, listener.getsockname()[1], secret]))
        giving = _connected(store, behind)
        return _accepted(listener, secret, before), giving


def _connected(store: Store, rank: int | None) -> Channel | None:
    if rank is None:
        return None
    address, port, secret = json.loads(store.get(f"rows{rank}"))
    connection = socket.create_connection((address, port), settings().rank_start_seconds)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection)
    channel.send(secret)
    return channel


def _accepted(listener: socket.socket, secret: str, rank: int) -> Channel:
    """The connection of the rank that knows the secret; other connections are closed."""
    seconds = settings().rank_start_seconds
    deadline = time.monotonic() + seconds
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            channel = Channel(listener.accept()[0])
            channel.socket.settimeout(max(0.01, deadline - time.monotonic()))
            if channel.receive() == secret:
                channel.socket.settimeout(None)
                return channel
            channel.close()
        except TimeoutError:
            raise RankError(
                f"rank {rank}, which sends rows to this one, did not connect within {seconds:g} seconds",
                at="the engine's ranks",
                fix="check that all machines reach each other; if starting takes longer, set LLMC_RANK_START_SECONDS",
            ) from None
        except (OSError, ValueError):
            channel.close()
