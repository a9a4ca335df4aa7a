"""Prefix hits of models with states: whatever a request begins from, its answer has the bits of a cold run."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.generation_job import GenerationJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.server.engine_metrics import gauges
from tests.end_to_end.test_states import bits, built, tokens_of
from tests.quick_sample import quick_sample

# Of each family of states one, and hybrids.
FAMILIES = [
    *("bamba", "falcon_h1", "jamba", "kimi_linear", "mamba", "mamba2"),
    *("minimax", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm"),
]
SCHEDULES = {"bamba": 500, "falcon_h1": 500, "jamba": 500, "qwen3_next": 500}
WAYS = [
    SamplingParams(max_tokens=30, temperature=0.8, seed=3, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, seed=4, n=3, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=9, beam_width=3, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=1, ignore_eos=True),
]
# A prompt, and which of the WAYS.
Ask = tuple[tuple[int, ...], int]


def told(job: GenerationJob) -> list[tuple[tuple[int, ...], list[object]]]:
    """Everything that was computed for a request, to the last bit."""
    return [(r.token_ids, [(p.logprob.hex(), p.top) for p in r.logprobs or ()]) for r in job.results()]


def job_of(engine: Engine, ask: Ask) -> GenerationJob:
    return engine.job_builder.job(GenerationRequest(prompt_token_ids=ask[0], params=WAYS[ask[1]], request_id=""))


@dataclass
class Cold:
    """What each request gets of an engine without a prefix cache, alone."""

    engine: Engine
    known: dict[Ask, list[tuple[tuple[int, ...], list[object]]]]

    def answer(self, ask: Ask) -> list[tuple[tuple[int, ...], list[object]]]:
        if ask not in self.known:
            job = job_of(self.engine, ask)
            self.engine.loop.add(job.first)
            while not job.finished:
                self.engine.loop.step()
            self.known[ask] = told(job)
        return self.known[ask]


def catalogue(cold: Cold, chance: random.Random) -> list[Ask]:
    """Prompts that part from each other in several places, further turns of them, and ways to ask."""
    system = tuple(tokens_of(70, seed=7))
    prompts = [system[: 30 + 7 * i] + tuple(tokens_of(5 + 9 * i, seed=i)) for i in range(6)]
    for prompt in list(prompts):
        ((answer, _),) = cold.answer((prompt, 0))
        prompts.append((*prompt, *answer, *tokens_of(11, seed=len(prompt))))
    return [(prompt, way) for prompt in prompts for way in (0, chance.randint(1, 3))]


def run_schedule(engine: Engine, asks: Sequence[Ask], cold: Cold, chance: random.Random) -> StepLoop:
    """Some of the requests, arriving between steps, some aborted; what is answered is what the cold run said."""
    executor, limits = engine.loop.executor, engine.limits
    least = -(-limits.max_model_len // limits.block_size)
    loop = StepLoop(
        executor,
        limits,
        chance.randint(least, 2 * least),
        chance.choice((5, 16, 33, 80)),
        program=engine._directory.program,
    )
    assert loop.scheduler.prefix_cache.snapshots is not None
    loop.scheduler.prefix_cache.snapshots._spacing = chance.choice((1, 16, 40))
    waiting = [chance.choice(asks) for _ in range(chance.randint(4, 10))]
    running: list[tuple[Ask, GenerationJob]] = []
    aborted: list[GenerationJob] = []
    while waiting or not loop.scheduler.idle:
        if waiting and (loop.scheduler.idle or chance.random() < 0.15):
            ask = waiting.pop()
            running.append((ask, job_of(engine, ask)))
            loop.add(running[-1][1].first)
        if running and chance.random() < 0.01:
            job = chance.choice(running)[1]
            aborted.append(job)
            for request in job.sequences:
                request.end()
                loop.remove(request)
        loop.step()
    for ask, job in running:
        assert job in aborted or told(job) == cold.answer(ask)
    return loop


def run_schedules(path: Path, count: int, seed: int) -> None:
    """With one snapshot, a few and many; the loops' hits and preemptions together show that there were some."""
    chance, hits, preemptions = random.Random(seed), 0, 0
    with llmc.load(path, prefix_cache=False, threads=1) as alone:
        cold, state = Cold(alone, {}), alone.manifest.memory["states_per_sequence"]
        asks = catalogue(cold, chance)
        engines = [llmc.load(path, state_cache_bytes=n * state, threads=1 + n % 2) for n in (1, 4, 40)]
        for _ in range(count):
            loop = run_schedule(chance.choice(engines), asks, cold, chance)
            hits += loop.scheduler.prefix_cache.hits
            preemptions += loop.scheduler.preemptions
        for engine in engines:
            engine.close()
    assert hits > 50 * count and preemptions > count // 10


def test_schedules_with_hits_forks_and_preemption_equal_a_cold_run(hybrid: Path) -> None:
    run_schedules(hybrid, 12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SCHEDULES)
def test_two_thousand_schedules_equal_a_cold_run(model_type: str, tmp_path: Path) -> None:
    path = built(tiny_architecture(model_type), tmp_path / "engine.llmc", block_size=8, max_model_len=240)
    run_schedules(path, SCHEDULES[model_type], seed=len(model_type))


@pytest.mark.parametrize("model_type", quick_sample(FAMILIES, set()))
def test_hits_forks_and_preemption_of_each_family(model_type: str, tmp_path: Path) -> None:
    """Alone and cold; again behind a hit; then many of them in a cache that is too small, with snapshots."""
    path = built(tiny_architecture(model_type), tmp_path / "engine.llmc", max_model_len=288)
    prompts = [tokens_of(100 + 11 * i, seed=i % 2)[: 90 + 11 * i] for i in range(5)]
    params = SamplingParams(max_tokens=90, temperature=0.9, seed=3, n=2, logprobs=1, ignore_eos=True)
    beams = SamplingParams(max_tokens=12, beam_width=3, ignore_eos=True)
    with llmc.load(path, prefix_cache=False) as engine:
        cold = [bits(engine, [prompt], params)[0] for prompt in prompts]
        searched = bits(engine, prompts[:1], beams)
    with llmc.load(path) as warm:
        for _ in range(2):
            assert bits(warm, prompts, params) == cold
            assert bits(warm, prompts[:1], beams) == searched
        assert [completion.cached_tokens >= 80 for completion in warm.generate(prompts, params)] == [True] * 5
    block_bytes = warm.manifest.memory["kv_per_token"] * warm.limits.block_size
    if not block_bytes:
        return  # Without attention blocks weigh nothing, and nobody ever has to give way.
    with llmc.load(path, kv_cache_bytes=20 * block_bytes, max_step_tokens=20) as tight:
        assert bits(tight, prompts, params) == cold
        assert bits(tight, prompts[:1], beams) == searched
        assert tight.loop.scheduler.preemptions > 0


@pytest.mark.parametrize("target", quick_sample(["cpu", "reference"], set()))
def test_a_conversation_is_found_turn_after_turn(target: str, tmp_path: Path) -> None:
    path = built(tiny_architecture("jamba"), tmp_path / "engine.llmc", target=target, max_model_len=320)
    params = SamplingParams(max_tokens=70, temperature=0.7, seed=1, logprobs=1, ignore_eos=True)
    with llmc.load(path, prefix_cache=False) as cold, llmc.load(path) as warm:
        talk = tokens_of(70)
        for turn in range(3):
            completion = warm.generate([talk], params)[0]
            assert bits(warm, [talk], params) == bits(cold, [talk], params)
            # Not more than the tokens between two snapshots and a block are computed again, beside what is new.
            assert turn == 0 or completion.cached_tokens >= len(talk) - 5 - 80
            talk = [*talk, *completion.choices[0].token_ids, *tokens_of(5, seed=turn)]


@pytest.fixture
def stats_engine(hybrid: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(llmc.load(hybrid))
    yield engine
    engine.close()


def test_a_long_prompt_that_comes_again_is_a_hit_in_the_stats(stats_engine: AsyncEngine) -> None:
    """vllm#54504: the hit rate of models with states was 0, whatever was found."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    async def ask() -> None:
        for _ in range(20):
            async for _ in stats_engine.generate(tokens_of(200), params):
                pass

    asyncio.run(ask())
    stats = stats_engine.stats()
    assert stats.prefix_cache_hits > 0.9 * stats.prefix_cache_queries
    assert stats.snapshots is not None and 0 < stats.snapshots.used <= stats.snapshots.total == 32
    measured = {name: value for name, _, value in gauges(stats)}
    assert (measured["state_snapshots"], measured["state_snapshots_used"]) == (32, stats.snapshots.used)


def test_no_room_for_snapshots_finds_nothing(hybrid: Path) -> None:
    prompts, params = [tokens_of(150)], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for prefix_cache, room in ((True, 0), (False, None)):
        with llmc.load(hybrid, prefix_cache=prefix_cache, state_cache_bytes=room) as engine:
            assert [engine.generate(prompts, params)[0].cached_tokens for _ in range(2)] == [0, 0]
            snapshots = engine.loop.scheduler.prefix_cache.snapshot_stats
            assert snapshots is not None and snapshots.total == 0
    with pytest.raises(llmc.LlmcError, match="state_cache_bytes cannot be -1"):
        llmc.load(hybrid, state_cache_bytes=-1)
