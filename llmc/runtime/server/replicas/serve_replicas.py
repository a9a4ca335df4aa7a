"""Serve several replicas of an engine behind one port: `llmc serve --data-parallel-size N`."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmc.errors import LlmcError, OptionError
from llmc.runtime.kv_tier.wish import offloading_wish
from llmc.runtime.ranks.launch import refuse_launched
from llmc.runtime.server.app import application, outer_middleware
from llmc.runtime.server.host_check import hosts_of
from llmc.runtime.server.lifecycle import Lifecycle
from llmc.runtime.server.listener import address_of, listen
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.replicas.proxy import proxy_routes
from llmc.runtime.server.replicas.replica import Replica
from llmc.runtime.server.replicas.routing import Router, Routing
from llmc.runtime.server.serve import DrainingServer, event_loop
from llmc.runtime.threads import available_cores

_STOP_SECONDS = 10.0


def serve_replicas(options: ServeOptions, count: int, routing: str, listening: Callable[[str], None]) -> bool:
    """Serve until the process gets a signal to end. Returns whether every request was finished.

    listening: told the address once every replica answers.
    Raises OptionError for an unknown routing, RankError in a process that torchrun has started, LlmcError if a replica
    does not start.
    """
    names = [known.value for known in Routing]
    if routing not in names:
        raise OptionError(
            f"--routing cannot be {routing!r}", at=f"--routing {routing}", fix=f"give {' or '.join(names)}"
        )
    refuse_launched(
        "each replica",
        at=f"--data-parallel-size {count}",
        fix="start the server once, without torchrun: replicas start their ranks by themselves",
    )
    with listen(options) as listener, tempfile.TemporaryDirectory(prefix="llmc-replicas-") as folder:
        router, lifecycle = Router(Routing(routing)), Lifecycle()
        worker_options = options_of_worker(options, count)
        replicas = [Replica(i, worker_options, Path(folder), router.forget) for i in range(count)]
        middleware = outer_middleware(lifecycle, options, hosts_of(options))
        app = application(middleware, proxy_routes(replicas, router, lifecycle))
        server = DrainingServer(app, options, lifecycle, lambda: listening(address_of(listener, options)))

        async def run() -> None:
            try:
                async with asyncio.TaskGroup() as starting:
                    for replica in replicas:
                        starting.create_task(replica.start())
                await server.serve(sockets=[listener])
            finally:
                await asyncio.gather(*(started.stop(_STOP_SECONDS) for started in replicas))

        try:
            with event_loop() as runner:
                runner.run(run())
        except* LlmcError as failed:
            raise failed.exceptions[0] from None
        return server.drained


def options_of_worker(options: ServeOptions, count: int) -> ServeOptions:
    """The machine shared out: each replica gets its part of the cores, of the memory and of the second tier."""
    threads = options.threads or max(1, available_cores() // count)
    share = options.gpu_memory_utilization
    name = options.served_model_name or (options.engine.resolve().name.removesuffix(".llmc"),)
    wish = offloading_wish(options.kv_offloading_size, options.kv_offloading_dir)
    return replace(
        options,
        kv_offloading_size=None if wish is None else str(wish.size // count),
        engine=options.engine.resolve(),
        threads=threads,
        served_model_name=name,
        gpu_memory_utilization=None if share is None else share / count,
    )
