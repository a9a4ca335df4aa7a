"""Engines with a second tier: answers are those without one, and prefixes live on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc import SamplingParams
from llmc.engine_format.reader import read_engine
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.engine_stats import OffloadStats
from llmc.runtime.executors.cpp import CppExecutor
from llmc.runtime.executors.executor import BlockCaches
from llmc.runtime.executors.reference import ReferenceExecutor
from llmc.runtime.server.engine_metrics import EngineCollector
from tests.adapters.directories import llama_adapter
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.keep_less import keep_less
from tests.runtime.tiny_engine import mild_model, write_tiny_engine
from tests.tiny_models import tiny_tokens

TINY_BLOCK = 512
PROMPTS = [[(7 * i + 3 * number) % 97 for i in range(20 + number)] for number in range(5)]
TOKENS = tiny_tokens(150)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("tiny") / "tiny.llmc", model=mild_model())


def tight(tiny: Path, **options: Any) -> Engine:
    """With a cache that holds six blocks."""
    return llmc.load(tiny, kv_cache_bytes=6 * TINY_BLOCK, **options)


def said(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[object]:
    texts = engine.generate(prompts, max_tokens=12, ignore_eos=True, logprobs=1)
    forks = engine.generate(prompts[:2], max_tokens=8, n=3, temperature=1.0, seed=3, ignore_eos=True)
    return [
        (choice.token_ids, repr(choice.logprobs)) for completion in (*texts, *forks) for choice in completion.choices
    ]


def offload(engine: Engine) -> OffloadStats:
    tier = engine.loop.scheduler.second_tier
    assert tier is not None
    return tier.stats


def test_tokens_are_those_without_a_tier(tiny: Path) -> None:
    with llmc.load(tiny) as engine:
        expected = said(engine)
    for options in ({"prefix_cache": False}, {"speculation": {"method": "ngram", "num_speculative_tokens": 1}}):
        with tight(tiny, kv_offloading_size="1MB", **options) as engine:
            assert said(engine) == expected
            assert said(engine) == expected
            stats = offload(engine)
            assert engine.loop.scheduler.preemptions and stats.hits and not stats.damaged_blocks
            assert stats.swapped == 0 and engine.loop.pool.used == 0


def test_prefixes_live_across_restarts(tiny: Path, tmp_path: Path) -> None:
    outcomes = []
    for _ in range(2):
        with tight(tiny, kv_offloading_size="1MB", kv_offloading_dir=tmp_path) as engine:
            (answer,) = engine.generate([PROMPTS[0]], max_tokens=5, ignore_eos=True)
            outcomes.append((answer.choices[0].token_ids, answer.cached_tokens))
    assert outcomes[0][0] == outcomes[1][0] and [cached for _, cached in outcomes] == [0, 16]
    # Other weights are another engine.
    other = write_tiny_engine(tmp_path / "other.llmc", model=mild_model(1))
    with tight(other, kv_offloading_size="1MB", kv_offloading_dir=tmp_path) as engine:
        (answer,) = engine.generate([PROMPTS[0]], max_tokens=5, ignore_eos=True)
        assert answer.cached_tokens == 0 and not offload(engine).loaded_blocks


def test_nothing_is_left_without_a_directory(tiny: Path, own_cache: Path) -> None:
    with tight(tiny, kv_offloading_size="1MB") as engine:
        said(engine)
        assert list(own_cache.rglob("*.kv"))
    assert not list(own_cache.rglob("*.kv*"))


def test_a_tier_that_is_damaged_or_gone_costs_nothing_but_time(tiny: Path, tmp_path: Path) -> None:
    with llmc.load(tiny) as engine:
        expected = said(engine)
    with tight(tiny, kv_offloading_size="1MB", kv_offloading_dir=tmp_path) as engine:
        assert said(engine) == expected
        engine.loop._tier.settle()  # type: ignore[union-attr]
        for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
            path.write_bytes(path.read_bytes()[: -1 - number % 5] + b"x" * (1 + number % 2 * 4))
        assert said(engine) == expected and offload(engine).damaged_blocks
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        assert said(engine) == expected


CONTRADICTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"kv_offloading_size": 600}, "one block of 8 tokens takes"),
    ({"kv_offloading_size": "20 apples"}, "cannot be '20 apples'"),
    ({"kv_offloading_size": 0}, "cannot be 0"),
    ({"kv_offloading_size": True}, "cannot be True"),
    ({"kv_offloading_size": "900TB"}, "900000000000000 bytes, and [0-9]+ are free"),
    ({"kv_offloading_dir": "kv"}, "and no size"),
    ({"kv_offloading_dir": 5, "kv_offloading_size": 9999}, "cannot be 5"),
    ({"kv_offloading_dir": "kv", "kv_offloading_size": 9999, "prefix_cache": False}, "without the prefix cache"),
    ({"kv_offloading_dir": "tiny.llmc", "kv_offloading_size": 9999}, "is an engine"),
    ({"kv_offloading_dir": "tiny.llmc/graph.json", "kv_offloading_size": 9999}, "Not a directory"),
    ({"kv_offloading_dir": "/proc/1/kv", "kv_offloading_size": 9999}, "cannot write the second tier's blocks"),
]


@pytest.mark.parametrize(("options", "problem"), CONTRADICTIONS)
def test_bad_input(
    options: Mapping[str, Any], problem: str, tiny: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    with pytest.raises(llmc.LlmcError, match=problem) as caught:
        llmc.load(tiny, **options)
    assert caught.value.fix and "kv_offloading" in f"{caught.value.at} {caught.value.fix} {options}"


def test_a_directory_is_one_engines_at_a_time(tiny: Path, tmp_path: Path) -> None:
    options: Mapping[str, Any] = {"kv_offloading_size": "1MB", "kv_offloading_dir": tmp_path}
    with llmc.load(tiny, **options), pytest.raises(llmc.LlmcError, match="another process"):
        llmc.load(tiny, **options)
    llmc.load(tiny, **options).close()


def test_what_it_holds_is_told(tiny: Path) -> None:
    engine = AsyncEngine(tight(tiny, kv_offloading_size="1MB"))

    async def ask() -> None:
        for prompt in (*PROMPTS[:3], PROMPTS[0]):
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True)):
                pass

    asyncio.run(ask())
    stats = engine.stats().offload
    samples = {s.name: s.value for family in EngineCollector(engine, "m", 30.0).collect() for s in family.samples}
    engine.close()
    assert stats is not None and stats.blocks and stats.hits == 16
    assert samples["llmc:kv_offload_blocks"] == stats.blocks
    assert samples["llmc:kv_offload_max_bytes"] == 1_000_000
    assert samples["llmc:kv_offload_hits_total"] == 16


def swap_all(caches: BlockCaches, memories: list[Any], count: int) -> None:
    """Fill caches at random, move every block to another place, and back."""
    generator = np.random.default_rng(0)
    for memory in memories:
        memory.reshape(-1).view(np.uint8)[:] = generator.integers(0, 256, memory.nbytes, np.uint8)
    before = [memory.tobytes() for memory in memories]
    order = generator.permutation(count)
    caches.write_blocks(range(count), list(caches.read_blocks(order.tolist())()))
    assert [memory.tobytes() for memory in memories] != before
    caches.write_blocks(order.tolist(), list(caches.read_blocks(range(count))()))
    assert [memory.tobytes() for memory in memories] == before


def test_blocks_of_the_reference_move_exactly(tiny: Path) -> None:
    executor = ReferenceExecutor(read_engine(tiny), 7)
    tensors = executor._caches_of(executor._ranks[0], 0)
    swap_all(executor, [tensor[:7].numpy() for tensor in tensors], 7)
    executor.close()


def test_blocks_of_a_compiled_engine_move_exactly(draft_engine: Path) -> None:
    executor = CppExecutor(read_engine(draft_engine), 7, 1)
    swap_all(executor, list(executor._caches.values()), 7)
    executor.close()


def pressed(path: Path, **options: Any) -> Engine:
    """With a cache for one sequence of the longest length."""
    limits = read_engine(path).program
    blocks = limits.limits.blocks_for(limits.limits.max_model_len)
    return llmc.load(path, kv_cache_bytes=sum(limits.memories(blocks).values()), **options)


def answers(engine: Engine, adapter: str | None = None) -> list[object]:
    prompts = [*(TOKENS[:n] for n in (5, 33, 64, 90, 120)), [*TOKENS[:60], *TOKENS[20::-1]], TOKENS[:120]]
    texts = engine.generate(prompts, max_tokens=60, ignore_eos=True, adapter=adapter)
    forks = engine.generate([TOKENS[:70]], max_tokens=20, n=3, temperature=1.0, seed=3, ignore_eos=True)
    return [choice.token_ids for completion in (*texts, *forks) for choice in completion.choices]


LIMITS: Mapping[str, Any] = {"max_batch_tokens": 32, "max_sequences": 4, "max_model_len": 256, "block_size": 8}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "windows": ("gemma3_text", {}),
    "chunks": ("llama4_text", {}),
    "latents": ("deepseek_v3", {}),
    "int4": ("llama", {"kv_dtype": "int4"}),
    "cut": ("llama", {"passes": llmc.passes.extended(keep_less(EveryOtherBlock(8, 6, 2)))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_engines_under_pressure(kind: str, checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    family, options = KINDS[kind]
    path = tmp_path / "engine.llmc"
    llmc.build(checkpoint_of(family), path, **LIMITS, **options)
    with llmc.load(path, threads=1) as engine:
        expected = answers(engine)
    for more in ({}, {"speculation": {"method": "lookahead"}}, {"max_step_tokens": 7, "threads": 2}):
        for place in (None, tmp_path / "kv"):
            with pressed(path, kv_offloading_size="50MB", kv_offloading_dir=place, **more) as engine:
                assert answers(engine) == expected, (more, place)
                assert answers(engine) == expected, (more, place)
                stats = offload(engine)
                assert engine.loop.scheduler.preemptions and stats.hits and not stats.damaged_blocks


@pytest.mark.slow
def test_ten_thousand_blocks_in_and_out_change_no_token(tiny: Path) -> None:
    """The tier has room for half of the prompts, so it loses blocks, and takes them again, all the time."""
    shuffled = random.Random(5)
    prompts = [[shuffled.randrange(97) for _ in range(shuffled.randrange(10, 30))] for _ in range(32)]

    def told(engine: Engine, asked: list[list[int]]) -> list[object]:
        return [each.choices[0].token_ids for each in engine.generate(asked, max_tokens=10, ignore_eos=True)]

    with llmc.load(tiny, prefix_cache=False) as engine:
        expected = [told(engine, [prompt])[0] for prompt in prompts]
    moved = 0
    with tight(tiny, kv_offloading_size=40 * TINY_BLOCK) as engine:
        while moved < 10_000:
            order = shuffled.sample(range(len(prompts)), len(prompts))
            assert told(engine, [prompts[number] for number in order]) == [expected[number] for number in order]
            before, stats = moved, offload(engine)
            moved = stats.stored_blocks + stats.loaded_blocks
            assert moved > before and not stats.damaged_blocks
        assert stats.loaded_blocks > 500 and engine.loop.scheduler.preemptions and engine.loop.pool.used == 0


@pytest.mark.slow
def test_adapters_have_prefixes_of_their_own(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "engine.llmc"
    llmc.build(checkpoint_of("llama"), path, enable_lora=True, **LIMITS)
    adapter = llama_adapter(tmp_path / "adapter")
    expected: list[list[object]] = []
    for tier in ({}, {"kv_offloading_size": "50MB"}):
        with pressed(path, **tier) as engine:
            engine.load_adapter("a", adapter)
            expected.append([answers(engine), answers(engine, "a"), answers(engine)])
            if tier:
                assert offload(engine).hits
    assert expected[0] == expected[1] and expected[0][0] != expected[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["triton_interpreter", "ptx"])
def test_engines_for_gpus_keep_blocks_in_memory(
    executor: Any, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "engine.llmc"
    limits: Mapping[str, Any] = {"max_batch_tokens": 32, "max_sequences": 4, "max_model_len": 64, "block_size": 16}
    llmc.build(checkpoint_of("llama"), path, target="h100", dtype="float32", **limits)
    prompts = [TOKENS[begin : begin + 40] for begin in range(0, 60, 20)]

    def texts(engine: Engine) -> list[object]:
        completions = engine.generate([*prompts, prompts[0]], max_tokens=4, ignore_eos=True)
        return [choice.token_ids for completion in completions for choice in completion.choices]

    with llmc.load(path, executor=executor) as engine:
        expected = texts(engine)
    with pressed(path, executor=executor, kv_offloading_size="50MB") as engine:
        assert texts(engine) == expected and texts(engine) == expected
        assert offload(engine).hits and not list(tmp_path.rglob("*.kv"))


KILLED = """
import sys, llmc
with llmc.load(sys.argv[1], kv_cache_bytes=6 * 512, kv_offloading_size="1MB", kv_offloading_dir=sys.argv[2]) as engine:
    number = 0
    while True:
        engine.generate([[(5 * i + number) % 97 for i in range(30)]], max_tokens=4, ignore_eos=True)
        number += 1
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_blocks_or_nothing(tiny: Path, tmp_path: Path) -> None:
    for rounds in (3, 7, 12):
        command = [sys.executable, "-c", KILLED, str(tiny), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < rounds:
                pass
            os.kill(process.pid, signal.SIGKILL)
    with llmc.load(tiny) as plain, tight(tiny, kv_offloading_size="1MB", kv_offloading_dir=tmp_path) as engine:
        for number in range(12):
            prompt = [(5 * i + number) % 97 for i in range(30)]
            (wanted,), (actual,) = (
                opened.generate([prompt], max_tokens=4, ignore_eos=True) for opened in (plain, engine)
            )
            assert actual.choices[0].token_ids == wanted.choices[0].token_ids
        assert offload(engine).loaded_blocks and not offload(engine).damaged_blocks
    assert not list(tmp_path.rglob("*.part"))
