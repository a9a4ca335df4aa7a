"""Requests to the asyncio engine that end early: left, aborted or out of time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.executors.executor import Executor, Logits
from llmc.runtime.loading import load
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import PROMPTS, listen, request, serving
from tests.runtime.held_executor import HeldExecutor, hold
from tests.runtime.tiny_engine import mild_model, write_tiny_engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "mild.llmc", model=mild_model())


def test_leaving_or_aborting_frees_everything(path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=2)

    async def run() -> None:
        loaded = load(path)
        executor = hold(loaded)
        async with serving(loaded) as engine:
            executor.may_go.release()
            async with aclosing(engine.generate(request("left", PROMPTS[1], params))) as outputs:
                async for _ in outputs:
                    break
            task = asyncio.create_task(listen(engine, request("cancelled", PROMPTS[0], params)))
            while engine._in_flight < 1:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            executor.free()
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


class WatchedExecutor(HeldExecutor):
    """Tells of each step before it is computed, with its number from 1 on."""

    def __init__(self, inner: Executor, tell: Callable[[int], None]) -> None:
        super().__init__(inner)
        self.free()
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
        held_at: list[tuple[int, list[str]]] = []
        loaded = load(path)
        async with serving(loaded) as engine:

            def watch(number: int) -> None:
                if number == moment:
                    engine.abort("aborted")
                elif number == moment + 1:
                    views = engine.requests()
                    held = loaded.loop.pool.used - sum(view.blocks for view in views)
                    held_at.append((held, [view.request_id for view in views]))

            loaded.loop.executor = WatchedExecutor(loaded.loop.executor, watch)
            await asyncio.gather(listen(engine, asked), listen(engine, other))
        return held_at[0]

    async def run() -> None:
        for moment in (1, 2, 3, 6, 11):
            assert await held_after(moment) == (0, ["other"])

    asyncio.run(run())


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=19), SamplingParams(max_tokens=19, beam_width=2)])
def test_a_deadline_ends_a_request_with_what_it_has(path: Path, params: SamplingParams) -> None:
    async def run() -> None:
        engine = load(path)
        executor = hold(engine)
        async with serving(engine) as running:
            both = asyncio.gather(
                listen(running, request("late", PROMPTS[0], params, deadline_seconds=0.1)),
                listen(running, request("fine", PROMPTS[1], SamplingParams(max_tokens=19), deadline_seconds=6000.0)),
            )
            await asyncio.to_thread(executor.reached.acquire)
            loop = asyncio.get_running_loop()
            passed = loop.create_future()
            loop.call_later(0.1, passed.set_result, None)
            await passed
            executor.free()
            late, fine = await both
            assert late.reason() == "deadline" and len(late.tokens()) < 19
            assert fine.reason() == "length" and len(fine.tokens()) == 19

    asyncio.run(run())
