"""One replica: a process that serves an engine on a Unix socket, watched, and started again when it ends."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp

from llmc.errors import LlmcError
from llmc.processes.worker_command import worker_command, worker_environment
from llmc.runtime.server.options import ServeOptions

WORKER = "llmc.runtime.server.replicas.worker"
_POLL_SECONDS = 0.5
_START_SECONDS = 300.0
# A worker that does not answer gets no requests; only after this long does it count as stuck.
_STUCK_SECONDS = 20.0
# A worker that ends after it has served for a while is replaced at once, others after a pause that doubles.
_SETTLED_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class Replica:
    """A worker process and the router's record of it.

    in_flight, routed: requests now, and ever. restarts: how often it was started again. lost: called when it ended
    and with it what it had cached.
    """

    def __init__(self, index: int, options: ServeOptions, folder: Path, lost: Callable[[int], None]) -> None:
        self.index = index
        self.in_flight = 0
        self.routed = 0
        self.restarts = 0
        self.healthy = False
        self.socket = folder / f"replica-{index}.sock"
        place = options.kv_offloading_dir
        self._options = replace(
            options,
            kv_offloading_dir=None if place is None else place.absolute() / f"replica-{index}",
            uds=self.socket,
            api_keys=(),
            allowed_origins=(),
            allowed_hosts=(),
            proxy_headers=False,
            behind_router=True,
            replica_index=index,
        )
        self._lost = lost
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client session with connections to the worker."""
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self.socket), limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._session = aiohttp.ClientSession("http://replica", connector=connector, timeout=timeout)
        return self._session

    async def start(self) -> None:
        """Start the worker and wait until it answers. Raises LlmcError with its output if it ends instead."""
        await self._spawn()
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await self._answers():
                    if ended.done():
                        raise LlmcError(
                            f"replica {self.index} ended with code {ended.result()} before it served",
                            at=self._options.engine,
                            fix="see the output of the engine without replicas: llmc serve ENGINE",
                        )
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise LlmcError(
                f"replica {self.index} did not start within {_START_SECONDS:g} s",
                at=self._options.engine,
                fix="see how long the engine takes to start without replicas: llmc serve ENGINE",
            ) from None
        finally:
            ended.cancel()
        self.healthy = True
        self._watch = asyncio.create_task(self._keep_alive())

    async def stop(self, seconds: float) -> None:
        """End the worker: politely, then not."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._session is not None:
            await self._session.close()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _spawn(self) -> None:
        self.socket.unlink(missing_ok=True)
        # Its own session: Ctrl-C in a terminal is for the router, which then drains.
        self._process = await asyncio.create_subprocess_exec(
            *worker_command(WORKER),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=worker_environment(),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(self._options), default=str).encode() + b"\n")
        await self._process.stdin.drain()

    def lose(self) -> None:
        """Send it no requests until it answers again."""
        if self.healthy:
            self.healthy = False
            self._lost(self.index)

    async def _keep_alive(self) -> None:
        """Start it again whenever it has ended."""
        pause = 0.0
        while True:
            served = await self._until_ended()
            self.lose()
            pause = 0.0 if served >= _SETTLED_SECONDS else pause
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            self.restarts += 1
            await self._spawn()

    async def _until_ended(self) -> float:
        """Poll its health until its process has ended; kill it when it has not answered for too long. Returns for how
        long it has answered."""
        assert self._process is not None
        process, begun = self._process, time.monotonic()
        answered, patience = begun, _START_SECONDS
        while not await _ended_within(process, _POLL_SECONDS):
            if await self._answers():
                self.healthy = True
                answered, patience = time.monotonic(), _STUCK_SECONDS
                continue
            self.lose()
            if time.monotonic() - answered >= patience:
                process.kill()
        return answered - begun

    async def _answers(self) -> bool:
        try:
            async with self.session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


async def _ended_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    return process.returncode is not None
