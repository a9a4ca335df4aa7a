"""The asyncio engine: streams, aborts, deadlines, failures, draining, and that nobody's tokens depend on it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import ModelFailureError, RequestError, UnavailableError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.completion import Completion
from llmc.runtime.engine import Engine, load
from llmc.runtime.executors.executor import Logits
from llmc.runtime.generation_request import GenerationRequest, Priority
from llmc.runtime.request_output import RequestOutput, TokenLogprobs
from llmc.runtime.sampling_params import SamplingParams
from llmc.runtime.step import Step
from tests.runtime.tiny_engine import mild_model, write_tiny_engine

PROMPTS = [(5, 9, 2) * 7, (11,), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 8), (40, 41, 42, 43), (77,) * 27]
ONE_SEQUENCE = 5 * 512


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "mild.llmc", model=mild_model())


@pytest.fixture(scope="module")
def speaking_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "speaking.llmc"
    return write_tiny_engine(path, model=mild_model(1, 4096), with_tokenizer=True)


@pytest.fixture
def solo(path: Path) -> Iterator[Engine]:
    """The same engine, for one request at a time."""
    with load(path, prefix_cache=False) as engine:
        yield engine


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[AsyncEngine]:
    serving = AsyncEngine(engine)
    try:
        yield serving
        assert serving.stats().blocks_used == 0, "every block has come back"
        assert not serving.requests()
    finally:
        await asyncio.to_thread(serving.close)


def request(name: object, prompt: tuple[int, ...], params: SamplingParams, **more: object) -> GenerationRequest:
    base = GenerationRequest(prompt_token_ids=prompt, params=params, request_id=str(name))
    return replace(base, **more)  # type: ignore[arg-type]


@dataclass
class Heard:
    """All outputs of a request, joined."""

    outputs: list[RequestOutput]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def tokens(self, index: int = 0) -> tuple[int, ...]:
        return sum((c.token_ids for o in self.outputs for c in o.choices if c.index == index), ())

    def text(self, index: int = 0) -> str:
        return "".join(c.text for o in self.outputs for c in o.choices if c.index == index)

    def reason(self, index: int = 0) -> str | None:
        reasons = [c.finish_reason for o in self.outputs for c in o.choices if c.index == index]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    def logprobs(self, index: int = 0) -> tuple[TokenLogprobs, ...]:
        return sum((c.logprobs or () for o in self.outputs for c in o.choices if c.index == index), ())


async def listen(engine: AsyncEngine, asked: GenerationRequest) -> Heard:
    heard = Heard([output async for output in engine.generate(asked)])
    assert [o.finished for o in heard.outputs] == [False] * (len(heard.outputs) - 1) + [True]
    return heard


def agrees(heard: Heard, wanted: Completion) -> bool:
    return [heard.tokens(i) for i in range(len(wanted.choices))] == [c.token_ids for c in wanted.choices]


def test_streams_say_what_a_solo_run_says(path: Path, solo: Engine) -> None:
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=3),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=1, best_of=3),
        SamplingParams(max_tokens=9, n=2, beam_width=3, logprobs=1),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
    ]
    asked = [request(i, PROMPTS[i % 6], p) for i, p in enumerate(params * 3)]

    async def run() -> list[Heard]:
        async with serving(load(path)) as engine:
            heard = await asyncio.gather(*(listen(engine, each) for each in asked))
            stats = engine.stats()
            assert stats.finished == {"length": len(asked)}
            assert stats.generation_tokens == sum(o.last.usage.completion_tokens for o in heard)
            assert stats.recent_steps and stats.steps == len(stats.recent_steps)
            return heard

    for each, heard in zip(asked, asyncio.run(run()), strict=True):
        (wanted,) = solo.generate([each.prompt_token_ids], each.params)
        assert agrees(heard, wanted), each
        assert heard.last.usage.prompt_tokens == len(each.prompt_token_ids)
        assert heard.last.usage.completion_tokens == sum(len(c.token_ids) for c in wanted.choices)
        for index, choice in enumerate(wanted.choices):
            found = [(each.token_id, each.rank) for each in heard.logprobs(index)]
            assert found == [(each.token_id, each.rank) for each in choice.logprobs or ()]
        with_prompt = [o.prompt_logprobs for o in heard.outputs if o.prompt_logprobs is not None]
        assert len(with_prompt) == (wanted.prompt_logprobs is not None)
        times = heard.last.times
        assert times.started is not None and times.first_token is not None and times.finished is not None
        assert times.arrived <= times.started <= times.first_token <= times.finished


def test_text_streams_whole_characters_and_stops_before_stop_strings(speaking_path: Path) -> None:
    async def run() -> None:
        engine = load(speaking_path)
        prompt = tuple(engine.tokenize("Once"))
        (plain,) = engine.generate([prompt], SamplingParams(max_tokens=20))
        stop = plain.text[9:13]
        params = SamplingParams(max_tokens=20, stop=stop)
        async with serving(engine) as running:
            whole = await listen(running, request("whole", prompt, SamplingParams(max_tokens=20)))
            assert whole.text() == plain.text
            cut = await listen(running, request("cut", prompt, params))
            assert cut.text() == plain.text[: plain.text.index(stop)]
            assert cut.reason() == "stop" and cut.last.choices[0].stop_reason == stop
            kept = await listen(running, request("kept", prompt, replace(params, include_stop_str_in_output=True)))
            assert kept.text() == plain.text[: plain.text.index(stop)] + stop

    asyncio.run(run())


def test_leaving_or_aborting_frees_everything(path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=2)

    async def run() -> None:
        loaded = load(path)
        slow(loaded, 0.01)
        async with serving(loaded) as engine:
            async with aclosing(engine.generate(request("left", PROMPTS[0], params))) as outputs:
                async for _ in outputs:
                    break
            task = asyncio.create_task(listen(engine, request("cancelled", PROMPTS[0], params)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ended = asyncio.create_task(listen(engine, request("aborted", PROMPTS[1], SamplingParams(max_tokens=30))))
            async with aclosing(
                engine.generate(request("other", PROMPTS[1], SamplingParams(max_tokens=30)))
            ) as outputs:
                async for output in outputs:
                    engine.abort("aborted")
                    engine.abort("unknown")
                    assert output.request_id == "other"
            assert (await ended).reason() in ("abort", "length")
            while engine.requests():
                await asyncio.sleep(0.01)
            assert engine.stats().finished["abort"] >= 2

    asyncio.run(run())


class SlowExecutor:
    """Another executor with a pause in each step."""

    def __init__(self, inner: object, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds
        self.broken = False

    def step(self, step: Step) -> Logits:
        time.sleep(self.seconds)
        if self.broken:
            raise RuntimeError("the device fell off the bus")
        return self.inner.step(step)  # type: ignore[attr-defined, no-any-return]

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        self.inner.copy_blocks(copies)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.inner.close()  # type: ignore[attr-defined]


def slow(engine: Engine, seconds: float) -> SlowExecutor:
    """Slow an engine down."""
    executor = SlowExecutor(engine.loop._executor, seconds)
    engine.loop._executor = executor
    return executor


class WatchedExecutor(SlowExecutor):
    """Tells of each step before it is computed, with its number from 1 on."""

    def __init__(self, inner: object, tell: Callable[[int], None]) -> None:
        super().__init__(inner, 0.0)
        self._tell, self._steps = tell, 0

    def step(self, step: Step) -> Logits:
        self._steps += 1
        self._tell(self._steps)
        return super().step(step)


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}, {"prompt_logprobs": 1}])
def test_an_abort_at_any_step_has_freed_everything_by_the_next(path: Path, params: dict[str, Any]) -> None:
    """It comes while a step is computed, which cannot be taken back."""
    asked = request("aborted", PROMPTS[5], SamplingParams(max_tokens=12, **params))
    other = request("other", PROMPTS[1], SamplingParams(max_tokens=30))

    async def held_after(moment: int) -> tuple[int, list[str]]:
        """Blocks that nobody in flight accounts for, and who is in flight, when the step after that one begins."""
        found: list[tuple[int, list[str]]] = []
        loaded = load(path)
        async with serving(loaded) as engine:

            def watch(number: int) -> None:
                if number == moment:
                    engine.abort("aborted")
                elif number == moment + 1:
                    views = engine.requests()
                    held = loaded.loop.pool.used - sum(view.blocks for view in views)
                    found.append((held, [view.request_id for view in views]))

            loaded.loop._executor = WatchedExecutor(loaded.loop._executor, watch)
            await asyncio.gather(listen(engine, asked), listen(engine, other))
        return found[0]

    async def run() -> None:
        for moment in (1, 2, 3, 6, 11):
            assert await held_after(moment) == (0, ["other"])

    asyncio.run(run())


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=19), SamplingParams(max_tokens=19, beam_width=2)])
def test_a_deadline_ends_a_request_with_what_it_has(path: Path, params: SamplingParams) -> None:
    async def run() -> None:
        engine = load(path)
        slow(engine, 0.02)
        async with serving(engine) as running:
            late, fine = await asyncio.gather(
                listen(running, request("late", PROMPTS[0], params, deadline_seconds=0.15)),
                listen(running, request("fine", PROMPTS[1], SamplingParams(max_tokens=19), deadline_seconds=60.0)),
            )
            assert late.reason() == "deadline" and len(late.tokens()) < 19
            assert fine.reason() == "length" and len(fine.tokens()) == 19

    asyncio.run(run())


def test_refusals_come_before_anything_runs(path: Path) -> None:
    async def run() -> None:
        async with serving(load(path)) as engine:
            for prompt, params in (
                ((), SamplingParams()),
                ((1,) * 40, SamplingParams()),
                ((97,), SamplingParams()),
                ((1,), SamplingParams(stop="x")),
                ((1,), SamplingParams(n=1000)),
            ):
                with pytest.raises(RequestError):
                    await listen(engine, request("bad", prompt, params))
            first = asyncio.create_task(listen(engine, request("twin", PROMPTS[0], SamplingParams(max_tokens=19))))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="'twin' is in flight"):
                await listen(engine, request("twin", PROMPTS[0], SamplingParams()))
            assert (await first).reason() == "length"

    asyncio.run(run())


def test_broken_logits_fail_their_request_only(tmp_path: Path) -> None:
    model = mild_model()
    model.weights["embedding"][13] = float("nan")

    async def run() -> None:
        async with serving(load(write_tiny_engine(tmp_path / "nan.llmc", model=model))) as engine:
            good = [request(i, prompt, SamplingParams(max_tokens=9)) for i, prompt in enumerate(PROMPTS)]
            bad = [
                request(f"bad {i}", (1,) * 12 + (13,), SamplingParams(max_tokens=9, n=i, temperature=1.0))
                for i in (1, 2)
            ]
            results = await asyncio.gather(*(listen(engine, each) for each in good + bad), return_exceptions=True)
            assert all(isinstance(each, ModelFailureError) for each in results[len(good) :])
            for each, heard in zip(good, results, strict=False):
                assert isinstance(heard, Heard)
                assert list(heard.tokens()) == model.greedy(list(each.prompt_token_ids), 9)
            assert engine.stats().finished == {"length": len(good), "error": 2}

    asyncio.run(run())


def test_draining_finishes_what_runs_and_refuses_what_comes(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        slow(engine, 0.01)
        async with serving(engine) as running:
            task = asyncio.create_task(listen(running, request("running", PROMPTS[1], SamplingParams(max_tokens=15))))
            await asyncio.sleep(0.03)
            assert not await running.drain(0.01), "not done yet"
            with pytest.raises(UnavailableError):
                await listen(running, request("late", PROMPTS[1], SamplingParams()))
            assert await running.drain(30.0)
            assert (await task).reason() == "length"

    asyncio.run(run())


def test_a_stuck_or_dead_loop_is_not_healthy(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        executor = slow(engine, 0.3)
        running = AsyncEngine(engine)
        assert running.is_healthy(0.1), "idle is healthy"
        task = asyncio.create_task(listen(running, request("stuck", PROMPTS[1], SamplingParams(max_tokens=2))))
        await asyncio.sleep(0.2)
        assert not running.is_healthy(0.1) and running.is_healthy(10.0)
        await task
        executor.broken = True
        with pytest.raises(UnavailableError, match="the engine's loop has died"):
            await listen(running, request("doomed", PROMPTS[1], SamplingParams(max_tokens=2)))
        assert not running.is_healthy(10.0)
        with pytest.raises(UnavailableError):
            await listen(running, request("after", PROMPTS[1], SamplingParams()))
        await asyncio.to_thread(running.close)

    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, lambda args: errors.append(args.exc_value)
    try:
        asyncio.run(run())
    finally:
        threading.excepthook = hook
    assert [str(error) for error in errors] == ["the device fell off the bus"], "the cause is told to the log"


def test_closing_ends_the_streams(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        slow(engine, 0.01)
        running = AsyncEngine(engine)
        task = asyncio.create_task(listen(running, request("open", PROMPTS[1], SamplingParams(max_tokens=30))))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(running.close)
        assert (await task).reason() == "abort"

    asyncio.run(run())


def test_cached_answers_need_no_step(path: Path) -> None:
    async def run() -> None:
        async with serving(load(path, output_cache_bytes=1 << 20)) as engine:
            params = SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=1, logprobs=1)
            first = await listen(engine, request("first", PROMPTS[0], params))
            steps = engine.stats().steps
            second = await listen(engine, request("second", PROMPTS[0], params))
            assert engine.stats().steps == steps
            assert [second.tokens(i) for i in (0, 1)] == [first.tokens(i) for i in (0, 1)]
            assert second.logprobs(1) == first.logprobs(1)
            await listen(engine, request("stranger", PROMPTS[0], params, tenant="other"))
            assert engine.stats().steps > steps, "tenants do not share answers"
            stats = engine.stats().output_cache
            assert stats is not None and (stats.queries, stats.hits) == (3, 1)

    asyncio.run(run())


def test_premium_requests_finish_before_free_ones(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        slow(engine, 0.005)
        order: list[str] = []

        async def one(running: AsyncEngine, name: str, priority: Priority) -> None:
            await listen(running, request(name, PROMPTS[0], SamplingParams(max_tokens=15), priority=priority))
            order.append(name)

        async with serving(engine) as running:
            free = [one(running, f"free {i}", Priority.FREE) for i in range(12)]
            premium = [one(running, f"premium {i}", Priority.PREMIUM) for i in range(4)]
            await asyncio.gather(*free, *premium)
        # There are four seats, which free ones may have taken before a premium one came.
        assert {f"premium {i}" for i in range(4)} <= set(order[:8])

    asyncio.run(run())


def soak(path: Path, count: int, seed: int, kv_cache_bytes: int | None) -> None:
    """Randomized requests on a small pool; whoever completes says what it says alone."""
    chance = random.Random(seed)
    with load(path, prefix_cache=False) as alone:
        wanted: dict[tuple[tuple[int, ...], int], Completion] = {}
        kinds = [
            SamplingParams(max_tokens=8),
            SamplingParams(max_tokens=12, temperature=1.0, seed=3),
            SamplingParams(max_tokens=10, temperature=0.8, seed=4, n=2, top_k=20),
            SamplingParams(max_tokens=6, beam_width=2, n=2),
            SamplingParams(max_tokens=9, temperature=1.0, seed=5, repetition_penalty=1.3, logprobs=1),
            SamplingParams(max_tokens=1, prompt_logprobs=0),
        ]
        stems = [tuple(chance.randrange(97) for _ in range(length)) for length in (3, 9, 16, 17, 26)]
        prompts = [(*stem, *(chance.randrange(97) for _ in range(tail))) for stem in stems for tail in (0, 1, 2)]
        for prompt in prompts:
            for kind, params in enumerate(kinds):
                wanted[prompt, kind] = alone.generate([prompt], params)[0]

    async def client(engine: AsyncEngine, number: int, room: asyncio.Semaphore) -> str:
        prompt, kind = chance.choice(prompts), chance.randrange(len(kinds))
        asked = request(
            number,
            prompt,
            kinds[kind],
            priority=chance.choice(list(Priority)),
            tenant=chance.choice((None, "one", "two")),
            deadline_seconds=chance.choice((None, None, None, 0.05)),
        )
        patience = chance.choice((None, None, None, 1, 2))
        outputs: list[RequestOutput] = []
        async with room, aclosing(engine.generate(asked)) as stream:
            async for output in stream:
                outputs.append(output)
                if patience is not None and len(outputs) >= patience and not output.finished:
                    if chance.random() < 0.5:
                        return "left"
                    engine.abort(asked.request_id)
        heard = Heard(outputs)
        early = {choice.finish_reason for output in outputs for choice in output.choices} & {"abort", "deadline"}
        if early:
            return str(early.pop())
        assert agrees(heard, wanted[prompt, kind]), (prompt, kinds[kind])
        return "complete"

    async def run() -> None:
        async with serving(load(path, kv_cache_bytes=kv_cache_bytes)) as engine:
            room = asyncio.Semaphore(24)
            clients = [client(engine, number, room) for number in range(count)]
            ends = await asyncio.wait_for(asyncio.gather(*clients), 3600)
            while engine.requests():
                await asyncio.sleep(0.01)
            stats = engine.stats()
            assert ends.count("complete") > count / 3 and "left" in ends and "abort" in ends
            assert stats.preemptions > 0 and stats.prefix_cache_hits > 0
            assert stats.running == stats.waiting == stats.blocks_used == 0
            assert stats.blocks_cached + stats.blocks_free == stats.blocks_total

    asyncio.run(run())


def test_a_short_soak_leaks_nothing_and_changes_no_token(path: Path) -> None:
    soak(path, 250, seed=0, kv_cache_bytes=2 * ONE_SEQUENCE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_soak(path: Path) -> None:
    soak(path, 10_000, seed=1, kv_cache_bytes=2 * ONE_SEQUENCE)
