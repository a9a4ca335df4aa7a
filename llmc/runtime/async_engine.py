"""The engine for asyncio: its loop runs in one thread, requests come and outputs go through queues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Unpack, cast
from uuid import uuid4

from llmc.api.keywords import shows_keywords
from llmc.errors import RankError, RequestError, UnavailableError
from llmc.runtime.async_client import Client, choice_news, deliver, loop_died, unavailable, view
from llmc.runtime.engine import Engine
from llmc.runtime.engine_stats import EngineStats, RequestView, StepRecord
from llmc.runtime.grammar.compiler import NewMask
from llmc.runtime.loading import given_or_loaded
from llmc.runtime.output_cache import CachedAnswer
from llmc.runtime.rank_restarts import RankRestarts
from llmc.runtime.requests.generation_job import SampledJob
from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_output import RequestOutput, RequestTimes
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, chosen_params, sampling_defaults
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.conversation import Conversation, is_conversation
from llmc.runtime.text.output_stream import ChoiceNews, News, OutputStream, news_of_results
from llmc.runtime.text.prompts import Prompt
from llmc.runtime.text.prompts import token_ids as ids_of

_RECENT_STEPS = 512


class AsyncEngine:
    """Serves many clients from one engine, its own from now on: who else generates with it gets a RequestError.

    engine: or the directory of one, which is loaded, with `speculation` as in llmc.load. Its thread starts with it;
    `close`, or the end of `async with`, stops the thread and closes the engine.
    """

    def __init__(self, engine: Engine | str | Path, *, speculation: str | Mapping[str, object] | None = None) -> None:
        self._engine = engine = given_or_loaded(engine, speculation)
        self._loop = engine.shared_loop.claim()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._clients: dict[str, Client] = {}
        self._owners: dict[Request, Client] = {}
        self._searching: set[Client] = set()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, News]]] = {}
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self._busy_since: float | None = None
        self._restarts = RankRestarts(
            self._loop.executor, lambda: self._commands.put(lambda: self._replace_ranks(None))
        )
        self._failure: BaseException | None = None
        self._draining = self._stopping = self._closed = False
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
        request_id: default one that nobody else has. Or a whole GenerationRequest, and nothing else. Raises
        RequestError for a request that this engine cannot serve (before anything is computed), ModelFailureError if
        its logits are not finite, UnavailableError when the engine is draining, closed or dead.
        """
        if self._draining:
            raise unavailable()
        arrived = time.monotonic()
        if not isinstance(prompt, GenerationRequest):
            prompt = GenerationRequest(
                prompt_token_ids=await asyncio.to_thread(self._token_ids, prompt),
                params=chosen_params(params, sampling),
                request_id=uuid4().hex if request_id is None else request_id,
                priority=priority,
                deadline_seconds=deadline_seconds,
                tenant=tenant,
                streams=streams,
                adapter=None if adapter is None else self._engine.adapters.get(adapter),
            )
        elif params is not None or sampling:
            raise RequestError(
                "sampling parameters came beside a GenerationRequest, which has its own",
                fix="put them into the request, or give the prompt alone",
            )
        async with aclosing(self._outputs(prompt, arrived)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(self, request: GenerationRequest, arrived: float) -> AsyncGenerator[RequestOutput, None]:
        params, job_builder, cache = request.params, self._engine.job_builder, self._engine.output_cache
        prompt_tokens = len(request.prompt_token_ids)
        decode = partial(self._engine.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        stream = OutputStream(request.request_id, prompt_tokens, lambda: job_builder.output_text(params), decode)
        job_builder.check("prompt", request)
        answer = None if cache is None else cache.get(request)
        if answer is not None:
            times = RequestTimes(arrived, arrived, arrived, time.monotonic())
            news = news_of_results(answer.results, answer.prompt_logprobs, prompt_tokens, times)
            yield stream.output([news])
            return
        job = job_builder.job(request, arrived=arrived, new_mask=await self._new_mask(params, arrived))
        streams = request.streams and isinstance(job, SampledJob) and job.given == len(job.choices)
        count = len(job.sequences)
        client = Client(request, job, stream, arrived, [prompt_tokens] * count, [False] * count, streams)
        # A command that is put after the thread has looked for the last time would wait forever.
        with self._lock:
            if self._closed:
                raise unavailable()
            self._commands.put(lambda: self._add(client))
            self._in_flight += 1
        finished = False
        try:
            while not finished:
                output = await stream.read()
                finished = output.finished
                if finished and cache is not None:
                    cache.put(request, CachedAnswer(tuple(job.results()), job.prompt_logprobs))
                yield output
        except RequestError:
            finished = True
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
            if not finished:
                self.abort(request.request_id)

    async def _new_mask(self, params: SamplingParams, arrived: float) -> NewMask | None:
        """What makes the masks of the request's grammar, compiled in a thread of its own; None without a grammar."""
        if params.grammar is None:
            return None
        found = self._engine.grammars.compiled(params.grammar)
        if found is not None:
            return found
        compiling = partial(self._engine.grammars.compile, params.grammar, arrived)
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, compiling)

    def abort(self, request_id: str) -> None:
        """End a request: its last output has finish_reason "abort". An unknown id is no error. From any thread."""
        self._commands.put(lambda: self._abort(request_id))

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
            windows=tuple(window.stats for window in self._loop.windows),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            finished=dict(self._finished),
            recent_steps=tuple(self._recent),
            output_cache=None if output_cache is None else output_cache.stats(),
            speculation=None if self._loop.speculation is None else self._loop.speculation.stats,
            rank_restarts=self._restarts.counts,
        )

    def requests(self) -> list[RequestView]:
        """The requests in flight, in order of arrival; from any thread."""
        now = time.monotonic()
        return [view(client, now) for client in list(self._clients.values())]

    def is_healthy(self, stall_seconds: float = 30.0) -> bool:
        """Whether the loop's thread lives and no step has been going on for longer than that."""
        busy_since = self._busy_since
        stuck = busy_since is not None and time.monotonic() - busy_since > stall_seconds
        return self._thread.is_alive() and self._failure is None and not stuck

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
                self._take_commands(wait=not self._clients)
                if self._clients and not self._stopping:
                    self._step()
                self._send()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._lock:
                self._closed = True
            self._take_commands(wait=False)
            for client in list(self._clients.values()):
                if self._failure is None:
                    client.job.stop("abort")
                self._finish(client, time.monotonic())
            self._send()

    def _step(self) -> None:
        begin = time.monotonic()
        self._busy_since = begin
        for request in self._loop.expire():
            self._publish(request, begin)
        try:
            plan = self._loop.step()
        except RankError as error:
            self._replace_ranks(error)
            return
        now = time.monotonic()
        touched = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.logit_rows)]
        for request in touched:
            self._publish(request, now)
        for client in [client for client in self._searching if client.job.finished]:
            self._finish(client, now)
        self._steps += 1
        self._recent.append(StepRecord.of(plan, begin, now, self._loop.executor_seconds))
        self._busy_since = None

    def _replace_ranks(self, error: RankError | None) -> None:
        """After one was lost: end what is in flight, and serve later requests with new ones. error: of a step."""
        self._busy_since, lost = None, self._restarts.lost
        if lost is None and error is not None:
            raise error  # Of another engine, that drafts.
        if lost is not None:
            clients = list(self._clients.values())
            for client in clients:
                self._finish(client, time.monotonic(), UnavailableError(lost.problem, fix="try again"))
            self._send()
            self._restarts.restart(len(clients))
            self._loop = self._engine.shared_loop.renew()

    def _take_commands(self, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def _add(self, client: Client) -> None:
        request_id = client.request.request_id
        if request_id in self._clients:
            self._post(client, error=RequestError(f"a request {request_id!r} is in flight", at="request_id"))
            return
        self._clients[request_id] = client
        if isinstance(client.job, SampledJob):
            self._owners.update(dict.fromkeys(client.job.sequences, client))
        else:
            self._searching.add(client)
        self._loop.add(client.job.first)

    def _abort(self, request_id: str) -> None:
        client = self._clients.get(request_id)
        if client is not None:
            client.job.stop("abort")
            self._finish(client, time.monotonic())

    def _stop(self) -> None:
        self._stopping = True

    def _publish(self, request: Request, now: float) -> None:
        """Tell the request's client of its new tokens, or of its end."""
        client = self._owners.get(request)
        if client is None:
            return
        client.first_token = client.first_token or now
        if request.finished and client.job.finished:
            self._finish(client, now)
            return
        if not client.streams:
            return
        assert isinstance(client.job, SampledJob)
        # The first choice starts the others: all of them have news then.
        choices = client.job.choices if not client.told_prompt else (request,)
        news = tuple(found for choice in choices if (found := choice_news(client, choice)) is not None)
        if news:
            self._post(client, news, now)

    def _finish(self, client: Client, now: float, gone: UnavailableError | None = None) -> None:
        """Take a request out of the loop and tell its client. gone: why it cannot go on if it is not finished."""
        del self._clients[client.request.request_id]
        self._searching.discard(client)
        job = client.job
        for sequence in job.sequences:
            self._owners.pop(sequence, None)
            self._loop.remove(sequence)
        self._prompt_tokens += len(client.request.prompt_token_ids)
        client.first_token = client.first_token or now
        if job.error is not None or not job.finished:
            self._finished["error"] += 1
            self._post(client, error=job.error or gone or loop_died())
        elif isinstance(job, SampledJob) and client.streams:
            news = tuple(found for choice in job.choices if (found := choice_news(client, choice)) is not None)
            self._finished[news[-1].finish_reason or "stop"] += 1
            self._post(client, news, now, finished=True)
        else:
            results = job.results()
            self._generation_tokens += sum(len(result.token_ids) for result in results)
            self._finished[results[0].finish_reason] += 1
            times = RequestTimes(client.arrived, job.first.standing.started, client.first_token, now)
            self._outbox.setdefault(client.stream.event_loop, []).append(
                (client.stream, news_of_results(results, job.prompt_logprobs, job.first.standing.cached_tokens, times))
            )

    def _post(
        self,
        client: Client,
        choices: tuple[ChoiceNews, ...] = (),
        now: float | None = None,
        *,
        finished: bool = False,
        error: RequestError | None = None,
    ) -> None:
        first, times = client.job.first, client.times
        if times is None or finished:
            times = RequestTimes(client.arrived, first.standing.started, client.first_token, now if finished else None)
            client.times = times
        prompt_logprobs = None if client.told_prompt or error else client.job.prompt_logprobs
        client.told_prompt = True
        self._generation_tokens += sum(len(choice.token_ids) for choice in choices)
        news = News(choices, first.standing.cached_tokens, times, finished, error, prompt_logprobs)
        self._outbox.setdefault(client.stream.event_loop, []).append((client.stream, news))

    def _send(self) -> None:
        """Hand the news of a step to the clients: waking an event loop is dear, so once for all of them."""
        outbox, self._outbox = self._outbox, {}
        for event_loop, news in outbox.items():
            # A client may have closed its event loop at any moment; there is nobody to tell then.
            with suppress(RuntimeError):
                event_loop.call_soon_threadsafe(deliver, news)
