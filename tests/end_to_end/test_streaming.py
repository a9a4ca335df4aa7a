"""The policy `streaming`: logits of StreamingLLM, long texts in a small cache, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import LlmcError, OptionError
from llmc.program import Streaming
from llmc.runtime.engine import Engine
from tests.end_to_end.company import assert_alike, least_cache_bytes
from tests.end_to_end.logits import assert_close
from tests.end_to_end.stored_rows import stored_rows
from tests.end_to_end.streaming_reference import streamed_logits
from tests.end_to_end.test_kv_compression import built, model
from tests.end_to_end.test_newest_rows import SIMULATED, difference
from tests.end_to_end.test_states import built as built_tiny
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

__all__ = ["built", "model"]

STREAMING = "streaming:budget=48,sinks=3,every=16"
POLICY = Streaming(budget=48, sinks=3, every=16)
TOKENS = tiny_tokens(200)


def said(engine: Engine, **options: Any) -> list[object]:
    """Tokens and log-probabilities of neighbours that share a prefix, and of choices that fork."""
    prompts = [TOKENS[:100], TOKENS[:100], [*TOKENS[:80], 5, 6], TOKENS[:30]]
    texts = engine.generate(prompts, max_tokens=60, logprobs=0, ignore_eos=True, **options)
    forks = engine.generate([TOKENS[:90]], max_tokens=30, n=3, temperature=1.0, seed=3, **options)
    return [(choice.token_ids, repr(choice.logprobs)) for answer in (*texts, *forks) for choice in answer.choices]


@pytest.mark.parametrize("target", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_logits_are_those_of_the_published_algorithm(target: str, built: Callable[..., Path]) -> None:
    """In chunks of 1 and 5 and whole."""
    expected = streamed_logits(POLICY, TOKENS)
    path = built(kv_compression=STREAMING, target=target)
    for chunk in (1, 5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            assert_close(engine.logits(TOKENS), expected)
            (answer,) = engine.generate([TOKENS[:100]], max_tokens=80, ignore_eos=True)
            group = engine.loop.groups[0]
            assert group.stats.dropped and not group.pool.used
    generated = list(answer.choices[0].token_ids)
    assert streamed_logits(POLICY, [*TOKENS[:100], *generated])[99:-1].argmax(-1).tolist() == generated


def test_bits_are_the_same_in_any_company(built: Callable[..., Path]) -> None:
    """Found prefixes, chunks, threads, drafts, preemption and a second tier change nothing."""
    path = built(kv_compression=STREAMING, target="cpu")
    with llmc.load(path, threads=1) as engine:
        expected = said(engine)
        assert said(engine) == expected and engine.loop.scheduler.prefix_cache.hits
    assert_alike(path, said, expected)
    least = least_cache_bytes(path)
    for size in (None, "100MB"):
        with llmc.load(path, kv_cache_bytes=least, kv_offloading_size=size) as engine:
            assert said(engine) == expected
            assert not engine.loop.groups[0].pool.used


@pytest.mark.parametrize(
    "cache",
    quick_sample(
        ["int8", "fp8", "int4:head", "bfloat16", "int8:g8", "fp8:g8", "int4:g8"], ["int8", "int4:head", "bfloat16"]
    ),
)
def test_stored_keys_are_turned(cache: str, built: Callable[..., Path]) -> None:
    option = "kv_dtype" if cache == "bfloat16" else "kv_cache"
    path, found = built(kv_compression=STREAMING, target="cpu", **{option: cache}), list[object]()
    expected, exact = (streamed_logits(POLICY, TOKENS, stored) for stored in (stored_rows(cache), None))
    for chunk in (5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            found.append(said(engine))
            ours = engine.logits(TOKENS)
            assert difference(ours, expected) < SIMULATED
            if cache in ("int8", "bfloat16"):
                # Rounding the codes alone costs 0.012; turned keys are rounded up to three times more.
                assert difference(ours, exact) < 0.03
    assert found[0] == found[1]


def test_a_budget_that_is_not_reached_changes_no_bit(built: Callable[..., Path]) -> None:
    with llmc.load(built(kv_compression="none"), threads=1) as engine:
        expected = engine.logits(TOKENS)
    with llmc.load(built(kv_compression="streaming:budget=128,every=128"), threads=1) as engine:
        assert (engine.logits(TOKENS) == expected).all()
        shorter = said(engine, kv_compression="streaming:budget=48,every=16")
        assert shorter != said(engine), "a request may keep less"


def test_a_long_text_needs_no_more_memory_than_a_short_one(model: Path, tmp_path: Path) -> None:
    """20,000 tokens of a model for 320 positions, which bounds no text any more."""
    path = tmp_path / "engine.llmc"
    with pytest.raises(OptionError, match="positions within the cache reach 384, but the model has 320"):
        llmc.build(model, path, max_model_len=1000, kv_compression="streaming:budget=256")
    limits: dict[str, Any] = {"max_batch_tokens": 128, "max_sequences": 1, "max_model_len": 20_480, "block_size": 16}
    llmc.build(model, path, dtype="float32", kv_compression="streaming:budget=192", **limits)
    tokens = (TOKENS * 100)[:19_950]
    with llmc.load(path, threads=1) as engine:
        (group,) = engine.loop.groups
        answers = engine.generate([tokens], max_tokens=50, ignore_eos=True)
        assert len(answers[0].choices[0].token_ids) == 50
        assert group.pool.count <= (320 + 128 + 64) // 16, "the pool has no room for more than 512 rows"
        assert group.stats.dropped == (19_999 - 192) // 128 * 128


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("streaming:budget=4", "budget=4 leaves no room in addition to the 4 first rows"),
        ("streaming:budget=48,every=0", "every=0 must be 1 or more"),
        ("streaming:budget=44,sinks=3,every=16", "budget=44 is not a multiple of block_size=8"),
        ("streaming:budget=48,sinks=3,every=24", "cannot run streaming:budget=48,sinks=3,every=24"),
        ("streaming:budget=32,every=16", "cannot run streaming:budget=32,sinks=4,every=16"),
        ("stride:step=2,recent=16,rows=8", "cannot run stride:"),
        ("none", "which cannot run none"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str, problem: str, built: Callable[..., Path]) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.load(built(kv_compression=STREAMING, target="cpu"), kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix
    if text == "none":
        assert caught.value.fix == "build without kv_compression"
    if "sinks=4" in problem:
        assert "give kv_compression=streaming:budget=32,sinks=3,every=16, or build" in caught.value.fix


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("gpt2", "not from llmc::rope alone"),
        ("gemma2", "a cache by rows, but other layers keep positions"),
        ("deepseek_v2", "latents, whose keys are not rows of one cache"),
    ],
)
def test_layers_whose_keys_do_not_turn_are_refused(family: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(LlmcError) as caught:
        built_tiny(tiny_architecture(family), tmp_path, block_size=8, max_model_len=128, kv_compression=STREAMING)
    assert problem in caught.value.problem


def test_onnxruntime_is_refused(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "kv_compression": STREAMING, "dtype": "float32"}
    with pytest.raises(LlmcError, match="have no kernels that choose or rotate rows for streaming:budget="):
        llmc.build(model, tmp_path / "e.llmc", target="onnxruntime", **options)


def test_rotated_codes_are_refused(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "kv_compression": STREAMING, "dtype": "float32"}
    with pytest.raises(LlmcError, match=r"come from llmc\.rotate_heads"):
        llmc.build(model, tmp_path / "e.llmc", kv_cache="int8:rotated", **options)
