"""The engine for asyncio: its loop runs in one thread, requests come and outputs go through queues."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Unpack, cast
from uuid import uuid4

from llmc.api.keywords import shows_keywords
from llmc.errors import EngineFailureError, RankError, RequestError, UnavailableError
from llmc.runtime.async_client import Client, engine_died, step_failed, unavailable
from llmc.runtime.clients_in_flight import ClientsInFlight
from llmc.runtime.engine import Engine
from llmc.runtime.engine_stats import EngineStats, RequestView, StepRecord
from llmc.runtime.grammar.compiler import CompiledGrammar
from llmc.runtime.loading import given_or_loaded
from llmc.runtime.loop.step_loop import step_failure
from llmc.runtime.output_cache import CachedAnswer
from llmc.runtime.rank_restarts import RankRestarts
from llmc.runtime.requests.boundary import as_llmc_error
from llmc.runtime.requests.generation_job import SampledJob
from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.requests.request_output import RequestOutput, RequestTimes
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, chosen_params, sampling_defaults
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.conversation import Conversation, is_conversation
from llmc.runtime.text.output_stream import OutputStream, news_of_results
from llmc.runtime.text.prompts import Prompt
from llmc.runtime.text.prompts import token_ids as ids_of

_RECENT_STEPS = 512
_log = logging.getLogger("llmc.engine")


class AsyncEngine:
    """Serves many clients from one engine, its own from now on: who else generates with it gets a RequestError.

    engine: or the directory of one, which is loaded, with `speculation` as in llmc.load. restarts: how often the engine
    is opened anew after a step has failed; then it is dead. Its thread starts with it; `close`, or the end of `async
    with`, stops the thread and closes the engine.
    """

    def __init__(
        self,
        engine: Engine | str | Path,
        *,
        speculation: str | Mapping[str, object] | None = None,
        restarts: int = 0,
    ) -> None:
        self._engine = engine = given_or_loaded(engine, speculation)
        self._loop = engine.shared_loop.claim()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._clients = ClientsInFlight()
        self._steps = self._restarted = 0
        self._most_restarts = restarts
        self._when_dead: Callable[[], None] | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self._busy_since: float | None = None
        self._rank_restarts = self._watched_ranks()
        self._failure: EngineFailureError | None = None
        self._draining = self._stopping = self._closed = self._is_reopening = self._is_over = False
        self._in_flight = 0
        self._lock = threading.Lock()
        # Their own: a slow grammar must not hold up what else the event loop has done in threads.
        self._grammar_threads = engine.grammars.threads()
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """For its info, limits and tokenizer."""
        return self._engine

    @shows_keywords(SamplingKeywords, sampling_defaults())
    async def generate(
        self,
        prompt: GenerationRequest | Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: Priority = Priority.FREE,
        deadline_seconds: float | None = None,
        tenant: str | None = None,
        streams: bool = True,
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come; the last has finished=True. Leaving the iteration early aborts the request.

        prompt: a text, token ids, a dict with either as in Engine.generate, or messages, which the model's chat
        template renders. params, or its fields as keywords: how to continue it. The others as in GenerationRequest;
        request_id: default a unique one. Or a whole GenerationRequest and no other argument. Raises
        RequestError for a request that this engine cannot serve (before anything is computed), ModelFailureError if
        its logits are not finite, RequestFaultError for an exception that serving it has raised, UnavailableError when
        the engine is draining, closed, dead, or being opened anew.
        """
        if not self.takes_requests:
            raise unavailable()
        arrived = time.monotonic()
        with as_llmc_error():
            asked = await self._request(
                prompt, params, sampling, request_id, priority, deadline_seconds, tenant, streams, adapter
            )
            async with aclosing(self._outputs(asked, arrived)) as outputs:
                async for output in outputs:
                    yield output

    async def _request(
        self,
        prompt: GenerationRequest | Prompt | Conversation,
        params: SamplingParams | None,
        sampling: SamplingKeywords,
        request_id: str | None,
        priority: Priority,
        deadline_seconds: float | None,
        tenant: str | None,
        streams: bool,
        adapter: str | None,
    ) -> GenerationRequest:
        """The arguments of `generate`."""
        if not isinstance(prompt, GenerationRequest):
            return GenerationRequest(
                prompt_token_ids=await asyncio.to_thread(self._token_ids, prompt),
                params=chosen_params(params, sampling),
                request_id=uuid4().hex if request_id is None else request_id,
                priority=priority,
                deadline_seconds=deadline_seconds,
                tenant=tenant,
                streams=streams,
                adapter=None if adapter is None else self._engine.adapters.get(adapter),
            )
        if params is not None or sampling:
            raise RequestError(
                "sampling parameters came with a GenerationRequest, which has its own",
                fix="put them into the request, or give the prompt alone",
            )
        return prompt

    async def _outputs(self, request: GenerationRequest, arrived: float) -> AsyncGenerator[RequestOutput, None]:
        params, job_builder, cache = request.params, self._engine.job_builder, self._engine.output_cache
        prompt_tokens = len(request.prompt_token_ids)
        decode = job_builder.decoder(params)
        stream = OutputStream(request.request_id, prompt_tokens, lambda: job_builder.output_text(params), decode)
        job_builder.check("prompt", request)
        answer = None if cache is None else cache.get(request)
        if answer is not None:
            stream.notes = answer.notes
            times = RequestTimes(arrived, arrived, arrived, time.monotonic())
            news = news_of_results(answer.results, answer.prompt_logprobs, prompt_tokens, times)
            yield stream.output([news])
            return
        grammar = await self._compiled(params, arrived)
        stream.notes = notes = () if grammar is None else grammar.notes
        job = job_builder.job(request, arrived=arrived, new_masks=grammar)
        streams = request.streams and isinstance(job, SampledJob) and job.given == len(job.choices)
        count = len(job.sequences)
        told, counted = [prompt_tokens] * count, [0] * count
        client = Client(request, job, job.first, stream, arrived, told, [False] * count, streams, counted=counted)
        # A command that is put after the thread has looked for the last time would wait forever.
        with self._lock:
            if self._closed:
                raise unavailable()
            self._commands.put(lambda: self._clients.add(client, self._loop))
            self._in_flight += 1
        finished = False
        try:
            while not finished:
                output = await stream.read()
                finished = output.finished
                if finished and cache is not None:
                    cache.put(request, CachedAnswer(tuple(job.results()), job.prompt_logprobs, notes))
                yield output
        except RequestError:
            finished = True
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
            if not finished:
                self.abort(request.request_id)

    async def _compiled(self, params: SamplingParams, arrived: float) -> CompiledGrammar | None:
        """The request's grammar, compiled in a thread of its own; None without a grammar."""
        if params.grammar is None:
            return None
        found = self._engine.grammars.compiled(params.grammar)
        if found is not None:
            return found
        compiling = partial(self._engine.grammars.compile, params.grammar, arrived)
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, compiling)

    def abort(self, request_id: str) -> None:
        """End a request: its last output has finish_reason "abort". An unknown id is ignored. May be called from any
        thread."""
        self._commands.put(lambda: self._clients.abort(request_id, self._loop))

    def stats(self) -> EngineStats:
        """Gauges and counters of this moment; cheap, from any thread."""
        scheduler, pool = self._loop.scheduler, self._loop.pool
        output_cache = self._engine.output_cache
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            blocks_total=pool.count,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            prefix_cache_queries=scheduler.prefix_cache.queries,
            prefix_cache_hits=scheduler.prefix_cache.hits,
            snapshots=scheduler.prefix_cache.snapshot_stats,
            groups=tuple(group.stats for group in self._loop.groups),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._clients.prompt_tokens,
            generation_tokens=self._clients.generation_tokens,
            steps=self._steps,
            finished=dict(self._clients.finished),
            recent_steps=tuple(self._recent),
            output_cache=None if output_cache is None else output_cache.stats(),
            speculation=None if self._loop.speculation is None else self._loop.speculation.stats,
            rank_restarts=self._rank_restarts.counts,
            restarts=self._restarted,
            offload=None if scheduler.second_tier is None else scheduler.second_tier.stats,
        )

    def requests(self) -> list[RequestView]:
        """The requests in flight, in order of arrival; from any thread."""
        return self._clients.views(time.monotonic())

    def is_healthy(self, stall_seconds: float = 30.0) -> bool:
        """Whether the loop's thread lives, the engine is open, and no step has been going on for longer than that."""
        busy_since = self._busy_since
        stuck = busy_since is not None and time.monotonic() - busy_since > stall_seconds
        return self._thread.is_alive() and self._failure is None and not self._is_reopening and not stuck

    @property
    def takes_requests(self) -> bool:
        """Whether it is neither draining, closed, dead, nor being opened anew."""
        return not (self._draining or self._closed or self._is_reopening)

    @property
    def failure(self) -> EngineFailureError | None:
        """The failure that the engine has died of."""
        return self._failure

    def when_dead(self, tell: Callable[[], None]) -> None:
        """Call `tell` from another thread once the engine has died and every client is notified; at once if that is the
        case."""
        with self._lock:
            self._when_dead, is_over = tell, self._is_over
        if is_over and self._failure is not None:
            tell()

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait until those in flight have ended; false if some were left at the timeout."""
        self._draining = True
        end = time.monotonic() + timeout_seconds
        while self._in_flight:
            if time.monotonic() > end or not self._thread.is_alive():
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        """Abort what is in flight, stop the thread, close the engine. A second call does nothing."""
        self._draining = True
        self._commands.put(self._stop)
        self._thread.join()
        self._engine.shared_loop.unclaim()
        self._engine.close()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        scheduler = self._loop.scheduler
        return f"<AsyncEngine of {self._engine!r}: {scheduler.running} running, {scheduler.waiting} waiting>"

    def _token_ids(self, prompt: Prompt | Conversation) -> tuple[int, ...]:
        if is_conversation(prompt):
            return tuple(self._engine.conversations.token_ids(prompt))
        return tuple(ids_of(cast(Prompt, prompt), self._engine.tokenizer))

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except BaseException as error:
                    self._open_anew(error)
        except BaseException as error:
            self._failure = step_failure(error)
            raise
        finally:
            with self._lock:
                self._closed = True
            self._take_commands(wait=False)
            if self._failure is None:
                self._clients.stop_all(self._loop)
            else:
                self._clients.fail_all(engine_died(self._failure), self._loop)
            self._clients.send()
            with self._lock:
                self._is_over, tell = True, self._when_dead
            if self._failure is not None and tell is not None:
                tell()

    def _turn(self) -> None:
        """Do what was asked for, and one step."""
        self._take_commands(wait=not self._clients)
        if self._clients and not self._stopping:
            self._step()
        self._clients.send()

    def _step(self) -> None:
        begin = time.monotonic()
        self._busy_since = begin
        self._clients.tell(self._loop.expire(), self._loop)
        try:
            plan = self._loop.step()
        except RankError as error:
            self._replace_ranks(error)
            return
        touched = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.logit_rows or chunk.request.error)]
        self._clients.tell(touched, self._loop)
        now = time.monotonic()
        self._steps += 1
        self._recent.append(StepRecord.of(plan, begin, now, self._loop.executor_seconds))
        self._busy_since = None

    def _open_anew(self, error: BaseException) -> None:
        """After a step has failed: end what is in flight, and serve later requests with the engine opened anew. Raises
        the error if that was done often enough, or what opening raises."""
        self._busy_since = None
        if self._stopping or self._restarted >= self._most_restarts:
            raise error
        self._is_reopening = True
        failure = step_failure(error)
        ended = self._clients.fail_all(step_failed(failure), self._loop)
        self._clients.send()
        _log.error("%s; %d requests end with an error", failure.problem, ended, exc_info=error)
        self._restarted += 1
        begin = time.monotonic()
        self._loop = self._engine.reopen()
        self._rank_restarts = self._watched_ranks()
        self._is_reopening = False
        seconds, times = time.monotonic() - begin, f"{self._restarted} of {self._most_restarts}"
        _log.warning("the engine was opened anew in %.1f s (%s times)", seconds, times)

    def _watched_ranks(self) -> RankRestarts:
        """Told of lost ranks of the engine that is open now."""
        executor = self._loop.executor
        return RankRestarts(executor, lambda: self._commands.put(lambda: self._replace_ranks(None)))

    def _replace_ranks(self, error: RankError | None) -> None:
        """After one was lost: end what is in flight, and serve later requests with new ones. error: of a step."""
        self._busy_since, lost = None, self._rank_restarts.lost
        if lost is None and error is not None:
            raise error  # The error is of the drafter's engine.
        if lost is not None:
            ended = self._clients.fail_all(UnavailableError(lost.problem, fix="try again"), self._loop)
            self._clients.send()
            self._rank_restarts.restart(ended)
            self._loop = self._engine.shared_loop.renew()

    def _take_commands(self, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def _stop(self) -> None:
        self._stopping = True
