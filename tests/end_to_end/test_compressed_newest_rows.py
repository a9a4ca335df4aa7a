"""KV compression of caches of codes whose newest rows stay exact: answers, their bits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.engine_format.reader import engine_to_run
from llmc.errors import OptionError, PassError, RequestError
from llmc.program import CachePolicy
from llmc.runtime.engine import Engine
from llmc.runtime.requests.request_policies import RequestPolicies
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.keep_less import keep_less
from tests.end_to_end.calibration_queries import write_calibration
from tests.end_to_end.company import assert_alike, least_cache_bytes
from tests.end_to_end.plain_codes import rounded_logits
from tests.end_to_end.test_newest_rows import SIMULATED, WITHOUT, difference, logits
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

STRIDE = "stride:step=3,recent=16,sinks=8,rows=8"
SCORED = [
    "snapkv:budget=48,window=16,every=16,sinks=2",
    "h2o:budget=48,every=16,sinks=2,recent=16",
    "compactor:budget=80,every=16,sinks=3,recent=14,chunk=32",
    "lru:budget=48,every=16,sinks=8,recent=16",
    "triattention:budget=24,every=16,sinks=2,recent=14",
    "triattention:budget=48,every=16,sinks=2,recent=16,pinned=0,heads=kv_head",
]
TOKENS = tiny_tokens(200)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An engine of a tiny llama, built once."""
    folder = tmp_path_factory.mktemp("compressed-newest")
    model = tiny_checkpoint("llama", folder / "model")

    def engine(target: str = "cpu", **options: Any) -> Path:
        path = folder / f"{'-'.join(str(value).replace('/', '-') for value in options.values())}-{target}.llmc"
        if not path.exists():
            limits = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256, "block_size": 8}
            given: dict[str, Any] = {"dtype": "float32", **limits, **write_calibration(folder), **options}
            llmc.build(model, path, target=target, **given)
        return path

    return engine


@pytest.mark.parametrize("kv_cache", ["int4:head:recent=13", "int8/int4:head:rotated:recent=16", "fp8:recent=1"])
def test_logits_are_those_of_the_mask_over_simulated_codes(kv_cache: str, engine_of: Callable[..., Path]) -> None:
    """The exact rows are the newest positions, whatever rows they have after cuts."""
    path = engine_of(kv_compression=STRIDE, kv_cache=kv_cache)
    ours, policy = logits(path), CachePolicy.from_text(STRIDE)
    assert difference(ours, rounded_logits(tiny_model("llama"), TOKENS, kv_cache, policy)) < SIMULATED
    of_codes = kv_cache.rpartition(":recent=")[0]
    if not kv_cache.startswith("fp8"):
        assert difference(ours, rounded_logits(tiny_model("llama"), TOKENS, of_codes, policy)) > WITHOUT
    assert difference(ours, rounded_logits(tiny_model("llama"), TOKENS, kv_cache)) > WITHOUT
    for chunk in (1, 5):
        assert np.array_equal(logits(path, chunk), ours)


def test_a_policy_from_outside_keeps_newest_rows_too(tmp_path: Path) -> None:
    """Its cuts leave the last three blocks as they are, and 25 rows would begin before them."""
    policy, model = EveryOtherBlock(8, 6, 2), tiny_checkpoint("llama", tmp_path / "model")
    limits: dict[str, Any] = {"max_batch_tokens": 128, "max_model_len": 256, "block_size": 8, "dtype": "float32"}
    limits["passes"] = llmc.passes.extended(keep_less(policy))
    assert policy.newest == 16
    llmc.build(model, tmp_path / "engine.llmc", target="cpu", kv_cache="int4:head:recent=16", **limits)
    expected = rounded_logits(tiny_model("llama"), TOKENS, "int4:head:recent=16", policy)
    assert difference(logits(tmp_path / "engine.llmc"), expected) < SIMULATED
    with pytest.raises(PassError, match="always keeps only the newest 16 rows, but attention reads the newest 17"):
        llmc.build(model, tmp_path / "refused.llmc", target="cpu", kv_cache="int4:head:recent=17", **limits)


def said(engine: Engine, **options: Any) -> list[object]:
    """Tokens and log-probabilities of neighbours that share a prefix, and of choices that fork."""
    prompts = [TOKENS[:100], TOKENS[:100], [*TOKENS[:80], 5, 6], TOKENS[:30]]
    texts = engine.generate(prompts, max_tokens=60, logprobs=0, ignore_eos=True, **options)
    forks = engine.generate([TOKENS[:90]], max_tokens=30, n=3, temperature=1.0, seed=3, **options)
    return [(choice.token_ids, repr(choice.logprobs)) for answer in (*texts, *forks) for choice in answer.choices]


@pytest.mark.parametrize("text", SCORED)
@pytest.mark.parametrize("kv_cache", ["int4:head:rotated:recent=14", "int8:recent=9"])
def test_scored_rows_leave_as_in_the_reference(text: str, kv_cache: str, engine_of: Callable[..., Path]) -> None:
    """The target `reference` runs the ops' own definitions. Codes for all rows give other numbers."""
    found = []
    for target in ("cpu", "reference"):
        path = engine_of(target, kv_compression=text, kv_cache=kv_cache)
        with llmc.load(path, threads=1) as engine:
            (answer,) = engine.generate([TOKENS[:100]], max_tokens=60, logprobs=0, ignore_eos=True)
            assert engine.loop.groups[0].stats.dropped, "nothing was evicted"
        choice = answer.choices[0]
        assert choice.logprobs is not None
        found.append((choice.token_ids, [each.logprob for each in choice.logprobs]))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=2e-3)


@pytest.mark.parametrize("text", [STRIDE, *SCORED])
def test_bits_are_the_same_in_any_company(text: str, engine_of: Callable[..., Path]) -> None:
    """Found prefixes, also of tables that were cut, forks, chunks, threads, drafts, preemption and a second tier."""
    path = engine_of(kv_compression=text, kv_cache="int4:head:rotated:recent=13")
    with llmc.load(path, threads=1) as engine:
        expected = said(engine)
        hits = engine.loop.scheduler.prefix_cache.hits
        assert said(engine) == expected and engine.loop.scheduler.prefix_cache.hits > hits
        assert engine.loop.groups[0].stats.dropped
        assert "nearest:window=13" in [str(group.built) for group in engine.loop.groups]
    assert_alike(path, said, expected)
    tight = least_cache_bytes(path)
    tiers: list[Mapping[str, Any]] = [{}, {"kv_offloading_size": "100MB"}]
    for tier in tiers:
        with llmc.load(path, kv_cache_bytes=tight, **tier) as engine:
            assert said(engine) == expected
            assert engine.loop.scheduler.preemptions and not any(group.pool.used for group in engine.loop.groups)


@pytest.mark.parametrize("text", [STRIDE, SCORED[0]])
def test_a_budget_that_is_not_reached_changes_no_bit(text: str, engine_of: Callable[..., Path]) -> None:
    path, plain = (engine_of(kv_compression=name, kv_cache="int4:head:recent=13") for name in (text, "none"))
    unreached = "stride:step=2,recent=256" if text == STRIDE else "snapkv:budget=248,window=16,sinks=2"
    with llmc.load(plain, threads=1) as engine:
        expected = said(engine)
    for asked in (unreached, "none"):
        with llmc.load(path, threads=1, kv_compression=asked) as engine:
            assert said(engine) == expected
            assert not engine.loop.groups[0].stats.dropped


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        (
            "stride:step=3,recent=8,sinks=8,rows=8",
            "always keeps only the newest 8 rows, but attention reads the newest 13",
            "give recent=16 or more, or build with kv_cache=FORMAT:recent=8",
        ),
        ("snapkv:budget=48,window=12,every=16", "only the newest 12 rows", "give window=13 or more"),
        (
            "snapkv:budget=16,window=8,every=16,sinks=4",
            "only the newest 8 rows",
            "give window=13 and budget=24 or more",
        ),
        ("lru:budget=16,recent=8,every=16", "only the newest 8 rows", "give recent=16 and budget=24 or more"),
        ("h2o:budget=48,every=16,recent=12", "only the newest 12 rows", "give recent=13 or more"),
        (
            "triattention:budget=48,every=16",
            "only the newest 0 rows",
            "give recent=13 or more, or build without :recent=",
        ),
        ("kvzip:budget=48", "only the newest 0 rows", "build without :recent="),
        ("streaming:budget=48,every=16", "renumbers positions, and the newest 13 rows", "without :recent="),
    ],
)
def test_policies_that_drop_newest_rows_are_refused(text: str, problem: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        model = tiny_checkpoint("llama", tmp_path / "model")
        options: dict[str, Any] = {"kv_cache": "int4:head:recent=13", "block_size": 8, **write_calibration(tmp_path)}
        llmc.build(model, tmp_path / "engine.llmc", target="cpu", kv_compression=text, **options)
    assert problem in caught.value.problem and fix in str(caught.value.fix)
    assert str(caught.value.at).startswith("kv_compression=")


@pytest.mark.parametrize("built", [STRIDE, SCORED[0]])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_loads_and_requests_with_such_policies_are_refused(
    built: str, target: str, engine_of: Callable[..., Path]
) -> None:
    path = engine_of(target, kv_compression=built, kv_cache="int4:head:recent=13")
    few, problem = "stride:step=3,recent=8,rows=8", "only the newest 8 rows, but attention reads the newest 13"
    with pytest.raises(OptionError, match=problem) as caught:
        llmc.load(path, kv_compression=few)
    assert "give recent=16 or more" in str(caught.value.fix)
    with llmc.load(path, threads=1) as engine:
        with pytest.raises(RequestError, match=problem) as asked:
            engine.generate([TOKENS], kv_compression=few)
        assert "give recent=16 or more" in str(asked.value.fix)
        engine.generate([TOKENS], max_tokens=1, kv_compression="stride:step=2,recent=16,rows=8")
    assert engine_to_run(path, check_weights=False)[0].program.exact_rows == 13


def test_a_stage_whose_layers_keep_a_window_refuses_them_too(tmp_path: Path) -> None:
    """The first stage reads no row from caches of newest rows itself, but it is the one that is asked."""
    model, layers = tiny_checkpoint("gemma2", tmp_path / "model"), {"pipeline_parallel_size": 2, "block_size": 8}
    options: dict[str, Any] = {"kv_cache": "int4:head:recent=13", "max_model_len": 256, **layers}
    llmc.build(model, tmp_path / "engine.llmc", target="cpu", kv_compression=STRIDE, **options)
    directory = engine_to_run(tmp_path / "engine.llmc", check_weights=False)[0]
    assert [stage.exact_rows for stage in directory.stage_programs] == [13, 13]
    with pytest.raises(OptionError, match="only the newest 8 rows, but attention reads the newest 13"):
        RequestPolicies(directory.program, "stride:step=3,recent=8,rows=8")


def test_an_engine_without_older_rows_drops_any(engine_of: Callable[..., Path]) -> None:
    """No sequence has rows before the newest 300, so all are exact, and no cut has to keep them."""
    text = "stride:step=3,recent=8,sinks=8,rows=8"
    newest, plain = (logits(engine_of(kv_compression=text, kv_cache=name)) for name in ("int4:head:recent=300", "auto"))
    assert np.array_equal(newest, plain)
