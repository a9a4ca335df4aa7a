"""Many randomized clients of the asyncio engine at once, on a small pool: nothing leaks, and no token changes."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.loading import load
from llmc.runtime.requests.completion import Completion
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request_output import RequestOutput
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import Heard, agrees, request, serving
from tests.runtime.tiny_engine import mild_model, write_tiny_engine

ONE_SEQUENCE = 5 * 512


def soak(directory: Path, count: int, seed: int) -> None:
    """Randomized requests on a small pool; whoever completes says what it says alone."""
    path = write_tiny_engine(directory / "mild.llmc", model=mild_model())
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
        async with serving(load(path, kv_cache_bytes=2 * ONE_SEQUENCE)) as engine:
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


@pytest.mark.slow
def test_a_short_soak_leaks_nothing_and_changes_no_token(tmp_path: Path) -> None:
    soak(tmp_path, 250, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_soak(tmp_path: Path) -> None:
    soak(tmp_path, 10_000, seed=1)
