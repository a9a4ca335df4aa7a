"""The engine for asyncio: its loop runs in one thread, requests come and outputs go through queues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from llmc.errors import RequestError, UnavailableError
from llmc.runtime.engine import Engine
from llmc.runtime.engine_stats import EngineStats, RequestView, StepRecord
from llmc.runtime.generation import Generation
from llmc.runtime.generation_request import GenerationRequest
from llmc.runtime.request_output import ChoiceDelta, RequestOutput, RequestTimes, Usage

_RECENT_STEPS = 512


@dataclass
class _Stream:
    """A request in flight: the loop thread's side of it, and the queue that its client reads."""

    request: GenerationRequest
    generation: Generation
    deliver: Callable[[RequestOutput | RequestError], None]
    arrived: float
    first_token: float | None = None
    told: int = 0
    aborted: bool = False


@dataclass
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class AsyncEngine:
    """Serves many clients from one engine, which it owns from now on: nobody else may use it.

    Start it by creating it; `close` stops the thread and closes the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._counters = _Counters()
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self._busy_since: float | None = None
        self._failure: BaseException | None = None
        self._draining = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """For its info, limits and tokenizer; its generating methods are not to be called."""
        return self._engine

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; the last has finished=True. Leaving the iteration early aborts the request.

        Raises RequestError for a request that this engine cannot serve (before anything is computed), for one whose
        logits are not finite, and when the engine is draining, closed or dead.
        """
        if self._draining or not self._thread.is_alive():
            raise UnavailableError(
                "the engine takes no more requests", fix="send it to another replica, or try again later"
            )
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | RequestError] = asyncio.Queue()
        generation = self._engine.new_generation(list(request.prompt_token_ids), request.params)
        stream = _Stream(
            request,
            generation,
            lambda output: _call_in(loop, outputs.put_nowait, output),
            time.monotonic(),
        )
        self._commands.put(lambda: self._add(stream))
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, RequestError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request: its last output has finish_reason "abort". An unknown id is no error. From any thread."""
        self._commands.put(lambda: self._abort(request_id))

    def stats(self) -> EngineStats:
        """Gauges and counters of this moment; cheap, from any thread."""
        counters = self._counters
        streams = list(self._streams.values())
        pool = self._engine.loop.pool
        running = sum(bool(s.generation.blocks) for s in streams)
        return EngineStats(
            running=running,
            waiting=len(streams) - running,
            blocks_total=pool.count,
            blocks_used=pool.count - pool.free,
            blocks_cached=0,
            blocks_free=pool.free,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            preemptions=0,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
            finished=dict(counters.finished),
            recent_steps=tuple(self._recent),
        )

    def requests(self) -> list[RequestView]:
        """The requests in flight, in order of arrival."""
        now = time.monotonic()
        return [
            RequestView(
                request_id=s.request.request_id,
                priority=s.request.priority,
                state="running" if s.generation.blocks else "waiting",
                seconds=now - s.arrived,
                prompt_tokens=s.generation.prompt_tokens,
                computed_tokens=s.generation.computed,
                output_tokens=len(s.generation.tokens) - s.generation.prompt_tokens,
                blocks=len(s.generation.blocks),
            )
            for s in list(self._streams.values())
        ]

    def is_healthy(self, stall_seconds: float = 30.0) -> bool:
        """Whether the loop's thread lives and no step has been going on for longer than that."""
        busy_since = self._busy_since
        stuck = busy_since is not None and time.monotonic() - busy_since > stall_seconds
        return self._thread.is_alive() and self._failure is None and not stuck

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait until those in flight have ended; false if some were left at the timeout."""
        self._draining = True
        end = time.monotonic() + timeout_seconds
        while self._streams or not self._commands.empty():
            if time.monotonic() > end or not self._thread.is_alive():
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        """Abort what is in flight, stop the thread, close the engine."""
        self._draining = True
        self._commands.put(self._stop)
        self._thread.join()
        self._engine.close()

    def _run(self) -> None:
        loop = self._engine.loop
        try:
            while not self._stopping:
                self._take_commands(wait=not self._streams)
                if self._streams:
                    begin = time.monotonic()
                    self._busy_since = begin
                    loop.step()
                    self._busy_since = None
                    self._publish(begin, time.monotonic())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for request_id in list(self._streams):
                self._abort(request_id)

    def _take_commands(self, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def _add(self, stream: _Stream) -> None:
        if stream.request.request_id in self._streams:
            stream.deliver(RequestError(f"a request {stream.request.request_id!r} is in flight already"))
            return
        self._streams[stream.request.request_id] = stream
        self._engine.loop.add(stream.generation)

    def _abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._engine.loop.remove(stream.generation)
            self._tell(stream, time.monotonic(), aborted=True)

    def _stop(self) -> None:
        self._stopping = True

    def _publish(self, begin: float, now: float) -> None:
        decoded = 0
        for request_id, stream in list(self._streams.items()):
            generation = stream.generation
            fresh = len(generation.output) - stream.told
            if fresh or generation.finished:
                decoded += fresh
                stream.first_token = stream.first_token or now
                if generation.finished:
                    del self._streams[request_id]
                self._tell(stream, now)
        self._counters.steps += 1
        self._counters.generation_tokens += decoded
        self._recent.append(StepRecord(now, now - begin, now - begin, 0, decoded, len(self._streams)))

    def _tell(self, stream: _Stream, now: float, aborted: bool = False) -> None:
        generation = stream.generation
        reason = "abort" if aborted else generation.finish_reason
        counts = self._counters.finished
        if generation.error is not None:
            counts["error"] = counts.get("error", 0) + 1
            stream.deliver(generation.error)
            return
        output = generation.output
        if reason is not None:
            counts[reason] = counts.get(reason, 0) + 1
            self._counters.prompt_tokens += generation.prompt_tokens
        text = "" if generation.text is None else generation.text.read()
        delta = ChoiceDelta(0, text, output[stream.told :], None, reason)
        stream.told = len(output)
        usage = Usage(generation.prompt_tokens, 0, len(output))
        times = RequestTimes(stream.arrived, stream.arrived, stream.first_token, now if reason else None)
        stream.deliver(RequestOutput(stream.request.request_id, (delta,), usage, reason is not None, times))


def _call_in(
    loop: asyncio.AbstractEventLoop,
    put: Callable[[RequestOutput | RequestError], None],
    item: RequestOutput | RequestError,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(put, item)
