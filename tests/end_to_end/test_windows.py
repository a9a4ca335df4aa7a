"""Layers that give back what is behind their window answer by the bit as if they kept all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import llmc
from llmc import SamplingParams
from llmc.cli.cache_text import cache_text
from llmc.engine_format.reader import engine_to_run
from llmc.report.page.memory import memory_data
from llmc.runtime import loading
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.server.engine_metrics import EngineCollector
from tests.tiny_models import tiny_checkpoint, tiny_tokens

TOKENS = tiny_tokens(150)
PROMPTS = [*(TOKENS[:n] for n in (5, 33, 64, 90, 120)), [*TOKENS[:60], *TOKENS[20::-1]], TOKENS[:120]]


def answers(engine: Engine) -> list[object]:
    """Texts of neighbours, choices that fork, and logits."""
    forks = engine.generate([TOKENS[:70]], max_tokens=20, n=3, temperature=1.0, seed=3)
    texts = engine.generate(PROMPTS, max_tokens=60)
    chosen = [[output.token_ids for output in answer.choices] for answer in (*texts, *forks)]
    return [*chosen, engine.logits(TOKENS).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("gemma3_text", 1), ("mistral", 1), ("gpt_oss", 1), ("gemma3_text", 2)])
def test_answers_are_those_of_layers_that_keep_all(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.llmc"
    llmc.build(
        tiny_checkpoint(family, tmp_path / "model"),
        path,
        max_batch_tokens=32,
        max_sequences=4,
        max_model_len=256,
        block_size=8,
        tensor_parallel_size=ranks,
    )
    with llmc.load(path, threads=1) as engine:
        cold = answers(engine)
        cache = engine.loop.scheduler.prefix_cache
        before = cache.hits
        assert answers(engine) == cold
        assert cache.hits > before, "no prefix was found"
        window = engine.loop.groups[0]
        assert window.pool.count < engine.loop.pool.count // 2 and not window.pool.used
    if ranks == 1:

        def keeping_all(place: Path, *, check_weights: bool) -> object:
            directory, check = engine_to_run(place, check_weights=check_weights)
            return directory.with_one_table(), check

        monkeypatch.setattr(loading, "engine_to_run", keeping_all)
        with llmc.load(path, threads=1) as engine:
            assert engine.loop.groups[0].pool.count == engine.loop.pool.count
            assert answers(engine) == cold


def test_what_windows_hold_is_told(tmp_path: Path) -> None:
    path = tmp_path / "engine.llmc"
    model = tiny_checkpoint("mistral", tmp_path / "model", sliding_window=16)
    program = llmc.build(model, path, max_sequences=2, max_model_len=256, block_size=8).program
    assert cache_text(program) == "512 B per token, 512 B of it kept by nearest:window=16"
    first, window = memory_data(program)["cache"]["groups"]
    assert (first["block_bytes"], window) == (0, {"block_bytes": 4096, "blocks": 3, "policy": "nearest:window=16"})
    engine = AsyncEngine(llmc.load(path))

    async def ask() -> None:
        async for _ in engine.generate(TOKENS, SamplingParams(max_tokens=5, ignore_eos=True)):
            pass

    asyncio.run(ask())
    stats = engine.stats()
    samples = {
        sample.name: sample for family in EngineCollector(engine, "m", 30.0).collect() for sample in family.samples
    }
    engine.close()
    (window,) = stats.groups
    # Of the 154 tokens that were read all full blocks are kept, also behind the window.
    assert (window.policy, window.used) == ("nearest:window=16", 0)
    assert window.cached == stats.blocks_cached == 19
    sample = samples["llmc:kv_cache_group_blocks"]
    assert (sample.value, sample.labels["policy"]) == (window.total, "nearest:window=16")
    half = replace(stats, groups=(replace(window, used=window.total // 2),))
    assert half.cache_usage == half.groups[0].used / window.total


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_interpreted_kernels_read_nothing_behind_a_window(family: str, tmp_path: Path) -> None:
    """Found prefixes, forks, preemption and drafts where blocks behind the window are soon others'."""
    path = tmp_path / "engine.llmc"
    model = tiny_checkpoint(family, tmp_path / "model")
    llmc.build(
        model,
        path,
        target="h100",
        dtype="float32",
        max_batch_tokens=32,
        max_sequences=4,
        max_model_len=128,
        block_size=8,
    )
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, ignore_eos=True)
    prompts = [TOKENS[:60], [*TOKENS[:40], 5, 6, 7], TOKENS[:60]]

    def said(engine: Engine) -> list[list[Sequence[int]]]:
        return [[c.token_ids for c in completion.choices] for completion in engine.generate(prompts, params)]

    with llmc.load(path, executor="reference", prefix_cache=False) as reference:
        expected = said(reference)
    drafts = {"method": "lookahead"}
    with llmc.load(path, executor="triton_interpreter", speculation=drafts) as engine:
        assert said(engine) == expected
    with pytest.raises(llmc.LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, executor="triton_interpreter", kv_cache_bytes=1)
    needed = int(caught.value.problem.rsplit(" ", 1)[-1])
    with llmc.load(path, executor="triton_interpreter", kv_cache_bytes=needed) as tight:
        assert said(tight) == expected
        assert said(tight) == expected
        assert tight.loop.scheduler.preemptions > 0 and tight.loop.scheduler.prefix_cache.hits > 0
        assert not tight.loop.groups[0].pool.used
