"""A draft model beside an engine: what does not fit is refused, the memory is shared, and no answer changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc import AsyncEngine, Engine, load
from llmc.errors import EngineFormatError, OptionError
from llmc.runtime.device.memory import memory_of_blocks, plan_device_memory
from llmc.runtime.kv_capacity import block_count
from tests.runtime.tiny_engine import LIMITS, mild_model, tiny_model, tiny_program, write_tiny_engine

pytestmark = pytest.mark.usefixtures("open_gate")
PROMPTS = [[1, 2, 3], [4] * 8, [5, 6] * 5, [7]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny.llmc")


def drafting(path: Path, count: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": count}


@pytest.mark.parametrize("seed", [0, 1], ids=["the same model", "another model"])
def test_what_is_drafted_changes_no_token(path: Path, tmp_path: Path, seed: int) -> None:
    """Sequences of a quarter of the draft model's length, and steps of half of its size."""
    limits = replace(LIMITS, max_batch_tokens=8, max_sequences=2, max_logit_rows=2, max_model_len=80)
    second = tmp_path / "second.llmc"
    model = tiny_model(seed)
    model.weights["places"] = model.weights["places"].repeat(2, 1)
    write_tiny_engine(second, model=model, limits=limits)
    with load(path, speculation=drafting(second)) as engine:
        completions = [engine.generate(prompt, max_tokens=24)[0] for prompt in PROMPTS] + engine.generate(
            PROMPTS, max_tokens=24
        )
        assert engine.loop.speculation is not None
        counts = engine.loop.speculation.stats
        assert engine.loop.pool.used == 0
    assert [list(completion.token_ids) for completion in completions] == 2 * [
        tiny_model().greedy(p, 24) for p in PROMPTS
    ]
    assert counts.draft_tokens and (counts.accepted_tokens == counts.draft_tokens) == (seed == 0)


def test_the_draft_model_draws_with_the_noise_of_the_request(tmp_path: Path) -> None:
    """So the same model guesses every token, however they are drawn."""
    path = write_tiny_engine(tmp_path / "mild.llmc", model=mild_model())
    options: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8, "top_k": 20},
        {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
        {"temperature": 0.0, "frequency_penalty": 1.5},
        {"temperature": 1.0, "seed": 4, "typical_p": 0.7},
        {"temperature": 1.0, "seed": 5, "n": 2},
    ]
    with load(path, speculation=drafting(path)) as engine:
        for option in options:
            engine.generate(PROMPTS[0], max_tokens=30, **option)
        assert engine.loop.speculation is not None
        counts = engine.loop.speculation.stats
    assert counts.accepted_tokens == counts.draft_tokens > 100


def test_another_block_size_is_refused(path: Path, tmp_path: Path) -> None:
    second = write_tiny_engine(tmp_path / "second.llmc", limits=replace(LIMITS, block_size=16))
    with pytest.raises(OptionError, match="has blocks of 16 positions, the model of 8") as caught:
        load(path, speculation=drafting(second))
    assert caught.value.fix == "rebuild the draft model with block_size=8"


def test_shorter_sequences_are_refused(path: Path, tmp_path: Path) -> None:
    second = write_tiny_engine(tmp_path / "second.llmc", limits=replace(LIMITS, max_model_len=39))
    with pytest.raises(OptionError, match="has sequences of 39 tokens, the model of 40") as caught:
        load(path, speculation=drafting(second))
    assert "max_model_len=40, or the model with 39" in str(caught.value.fix)


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    first = write_tiny_engine(tmp_path / "first.llmc", with_tokenizer=True)
    tokenizer = json.loads((first / "tokenizer/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {index: token for token, index in vocabulary.items()}
    vocabulary[names[700]], vocabulary[names[701]] = 701, 700
    changed = tmp_path / "tokenizer.json"
    changed.write_text(json.dumps(tokenizer))
    second = write_tiny_engine(tmp_path / "second.llmc", with_tokenizer=True, tokenizer=changed)
    with pytest.raises(OptionError, match="another vocabulary: token 700 is ") as caught:
        load(first, speculation=drafting(second))
    assert repr(names[701]) in caught.value.problem and repr(names[700]) in caught.value.problem
    load(first, speculation=drafting(first)).close()


def test_a_vocabulary_of_another_size_is_refused(path: Path, tmp_path: Path) -> None:
    second = write_tiny_engine(tmp_path / "second.llmc", model=tiny_model(vocab=90))
    with pytest.raises(OptionError, match="it has 90 tokens, the model 97: the first that only one has is 90"):
        load(path, speculation=drafting(second))


def test_what_is_no_engine_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="there is no such engine"):
        load(path, speculation=drafting(tmp_path / "nothing.llmc"))


def test_both_caches_share_the_memory(path: Path) -> None:
    program = tiny_program(tiny_model())
    alone = block_count(program, 10_000_000 // 1000)
    assert block_count(program, 10_000_000 // 1000, beside=(program,)) == alone // 2
    with load(path, kv_cache_bytes=10_000, speculation=drafting(path)) as engine:
        assert engine.loop.pool.count == alone // 2
    free = 10**10
    one = plan_device_memory(program, free, 10_000)
    assert plan_device_memory(program, free, 10_000, (program,)).blocks == one.blocks // 2
    assert memory_of_blocks(program, one.blocks) == one


def test_an_async_engine_takes_it_for_a_directory(path: Path) -> None:
    async def tokens() -> list[int]:
        async with AsyncEngine(path, speculation=drafting(path)) as engine:
            outputs = [output async for output in engine.generate(PROMPTS[0], max_tokens=20)]
            assert engine.stats().speculation is not None
        return [token for output in outputs for token in output.choices[0].token_ids]

    assert asyncio.run(tokens()) == tiny_model().greedy(PROMPTS[0], 20)
    with load(path) as engine, pytest.raises(OptionError, match="already loaded"):
        AsyncEngine(engine, speculation=drafting(path))


def test_closing_the_engine_closes_the_draft_model(path: Path) -> None:
    engine: Engine = load(path, speculation=drafting(path))
    assert engine.loop.speculation is not None
    second: Any = engine.loop.speculation._drafter
    assert second._executor._tensors
    engine.close()
    assert not second._executor._tensors
