"""The asyncio engine: its streams say what solo runs say; refusals, failures, health, draining, cached answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.errors import ModelFailureError, RequestError, UnavailableError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.requests.job_builder import JobBuilder
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import PROMPTS, Heard, agrees, listen, request, serving
from tests.runtime.held_executor import hold
from tests.runtime.tiny_engine import mild_model, write_tiny_engine


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


def test_a_request_is_checked_once(path: Path, solo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], JobBuilder.check

    def counting(builder: JobBuilder, where: str, asked: GenerationRequest) -> None:
        checked.append(where)
        check(builder, where, asked)

    monkeypatch.setattr(JobBuilder, "check", counting)

    async def run() -> None:
        async with serving(load(path)) as engine:
            await listen(engine, request(0, PROMPTS[0], SamplingParams(max_tokens=2)))

    asyncio.run(run())
    solo.generate([[5], [6]], SamplingParams(max_tokens=2))
    assert checked == ["prompt", "prompt 0", "prompt 1"]


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
            heard = await asyncio.gather(*(listen(engine, asking) for asking in asked))
            stats = engine.stats()
            assert stats.finished == {"length": len(asked)}
            assert stats.generation_tokens == sum(o.last.usage.completion_tokens for o in heard)
            assert stats.recent_steps and stats.steps == len(stats.recent_steps)
            return heard

    for question, heard in zip(asked, asyncio.run(run()), strict=True):
        (wanted,) = solo.generate([question.prompt_token_ids], question.params)
        assert agrees(heard, wanted), question
        assert heard.last.usage.prompt_tokens == len(question.prompt_token_ids)
        assert heard.last.usage.completion_tokens == sum(len(c.token_ids) for c in wanted.choices)
        for index, choice in enumerate(wanted.choices):
            logprobs = [(logprob.token_id, logprob.rank) for logprob in heard.logprobs(index)]
            assert logprobs == [(logprob.token_id, logprob.rank) for logprob in choice.logprobs or ()]
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


def test_refusals_come_before_anything_runs(path: Path) -> None:
    async def run() -> None:
        async with serving(load(path)) as engine:
            for prompt, params in (
                ((), SamplingParams()),
                ((1,) * 40, SamplingParams()),
                ((97,), SamplingParams()),
                ((1,), SamplingParams(stop="x")),
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
            results = await asyncio.gather(*(listen(engine, asking) for asking in good + bad), return_exceptions=True)
            assert all(isinstance(result, ModelFailureError) for result in results[len(good) :])
            for question, heard in zip(good, results, strict=False):
                assert isinstance(heard, Heard)
                assert list(heard.tokens()) == model.greedy(list(question.prompt_token_ids), 9)
            assert engine.stats().finished == {"length": len(good), "error": 2}

    asyncio.run(run())


def test_draining_finishes_what_runs_and_refuses_what_comes(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        executor = hold(engine)
        async with serving(engine) as running:
            task = asyncio.create_task(listen(running, request("running", PROMPTS[1], SamplingParams(max_tokens=15))))
            await asyncio.to_thread(executor.reached.acquire)
            assert not await running.drain(0.01), "not done yet"
            with pytest.raises(UnavailableError):
                await listen(running, request("late", PROMPTS[1], SamplingParams()))
            executor.free()
            assert await running.drain(600.0)
            assert (await task).reason() == "length"

    asyncio.run(run())


def test_a_stuck_or_dead_loop_is_not_healthy(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        executor = hold(engine)
        running = AsyncEngine(engine)
        assert running.is_healthy(-1.0), "idle is healthy"
        task = asyncio.create_task(listen(running, request("stuck", PROMPTS[1], SamplingParams(max_tokens=2))))
        await asyncio.to_thread(executor.reached.acquire)
        assert not running.is_healthy(-1.0) and running.is_healthy(600.0)
        executor.free()
        await task
        executor.error = RuntimeError("the device fell off the bus")
        with pytest.raises(
            UnavailableError,
            match="a step of the engine has failed",
        ):
            await listen(running, request("doomed", PROMPTS[1], SamplingParams(max_tokens=2)))
        assert not running.is_healthy(600.0)
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


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, n=2, best_of=3),
        SamplingParams(max_tokens=9, beam_width=2),
    ],
)
def test_tokens_are_counted_as_they_are_generated(path: Path, params: SamplingParams) -> None:
    """Also of requests that do not stream, and of what cannot be streamed."""

    async def run() -> list[int]:
        engine, counted = load(path), list[int]()
        executor = hold(engine)
        async with serving(engine) as running:
            task = asyncio.create_task(listen(running, request("whole", PROMPTS[1], params, streams=False)))
            for _ in range(4):
                await asyncio.to_thread(executor.reached.acquire)
                counted.append(running.stats().generation_tokens)
                executor.may_go.release()
            executor.free()
            heard = await task
            assert running.stats().generation_tokens == heard.last.usage.completion_tokens
            assert running.stats().prompt_tokens == len(PROMPTS[1])
        return counted

    first = 2 if params.n == 2 else 1
    assert asyncio.run(run()) == [0, first, 2 * first, 3 * first]


def test_closing_ends_the_streams(path: Path) -> None:
    async def run() -> None:
        engine = load(path)
        executor = hold(engine)
        running = AsyncEngine(engine)
        task = asyncio.create_task(listen(running, request("open", PROMPTS[1], SamplingParams(max_tokens=30))))
        await asyncio.to_thread(executor.reached.acquire)
        closing = asyncio.create_task(asyncio.to_thread(running.close))
        while running._commands.empty():
            await asyncio.sleep(0)
        executor.free()
        await closing
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
        executor = hold(engine)
        order: list[str] = []

        async def one(running: AsyncEngine, name: str, priority: Priority) -> None:
            await listen(running, request(name, PROMPTS[0], SamplingParams(max_tokens=15), priority=priority))
            order.append(name)

        async with serving(engine) as running:
            free = [one(running, f"free {i}", Priority.FREE) for i in range(12)]
            premium = [one(running, f"premium {i}", Priority.PREMIUM) for i in range(4)]
            all_of_them = asyncio.gather(*free, *premium)
            while running._in_flight < 16:
                await asyncio.sleep(0)
            executor.free()
            await all_of_them
        # There are four seats, which free ones may have taken before a premium one came.
        assert {f"premium {i}" for i in range(4)} <= set(order[:8])

    asyncio.run(run())
