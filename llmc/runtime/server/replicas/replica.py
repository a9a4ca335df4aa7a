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
# A worker that does not answer gets no requests; only after this long is it taken for stuck.
_STUCK_SECONDS = 20.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 30.0


class Replica:
    """A worker process and what the router knows of it.

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
        self._options = replace(
            options,
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
        """Connections to the worker."""
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self.socket), limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._session = aiohttp.ClientSession("http://replica", connector=connector, timeout=timeout)
        return self._session

    async def start(self) -> None:
        """Start the worker and wait until it answers. Raises LlmcError if it ends instead, with what it said."""
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
                            fix="see what the engine says alone: llmc serve ENGINE",
                        )
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise LlmcError(f"replica {self.index} did not start within {_START_SECONDS:g} s") from None
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

    async def _keep_alive(self) -> None:
        """Poll its health; start it again when it has ended, kill it first when it has not answered for too long."""
        backoff, answered, patience = _FIRST_BACKOFF, time.monotonic(), _STUCK_SECONDS
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            assert self._process is not None
            if self._process.returncode is None and await self._answers():
                self.healthy, backoff = True, _FIRST_BACKOFF
                answered, patience = time.monotonic(), _STUCK_SECONDS
                continue
            if self.healthy:
                self.healthy = False
                self._lost(self.index)
            if self._process.returncode is None:
                if time.monotonic() - answered < patience:
                    continue
                self._process.kill()
                await self._process.wait()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)
            self.restarts += 1
            await self._spawn()
            answered, patience = time.monotonic(), _START_SECONDS

    async def _answers(self) -> bool:
        try:
            async with self.session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
