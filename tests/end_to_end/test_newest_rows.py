"""KV caches of codes whose newest rows stay exact: answers, their bits in any company, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.cli.cache_text import cache_text
from llmc.engine_format.reader import engine_to_run
from llmc.errors import OptionError
from llmc.runtime import loading
from llmc.runtime.engine import Engine
from tests.cache_policies.keep_less import keep_less
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.end_to_end.company import assert_alike, least_cache_bytes
from tests.end_to_end.logits import Logits
from tests.end_to_end.plain_codes import rounded_logits
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

TOKENS = tiny_tokens(200)
PROMPTS = [*(TOKENS[:n] for n in (5, 33, 48, 64, 120)), [*TOKENS[:60], *TOKENS[20::-1]], TOKENS[:120]]
# Keys and values that differ in the last bits get another code now and then: the mean over all logits, relative to
# their spread. Codes for all rows are farther away.
SIMULATED, WITHOUT = 3e-3, 1e-2


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An engine in fp32 of a family and a form of the cache, built once."""
    folder = tmp_path_factory.mktemp("newest")

    def engine(kv_cache: str, family: str = "llama", target: str = "cpu", **options: Any) -> Path:
        model, path = folder / family, folder / f"{family}-{kv_cache.replace('/', '-')}-{target}.llmc"
        if not model.exists():
            tiny_checkpoint(family, model)
        if not path.exists():
            limits = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256, "block_size": 8}
            llmc.build(model, path, target=target, dtype="float32", kv_cache=kv_cache, **{**limits, **options})
        return path

    return engine


def logits(path: Path, chunk: int | None = None) -> Logits:
    with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
        return engine.logits(TOKENS)


def difference(ours: Logits, theirs: Logits) -> float:
    return float(np.abs(ours - theirs).mean() / theirs.std())


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        ("llama", "int4:head:recent=21"),
        ("llama", "int4:head:rotated:recent=64"),
        ("llama", "int4:g8:rotated:recent=1"),
        ("llama", "fp8:recent=40"),
        ("llama", "int8/int4:head:rotated:recent=21"),
        ("llama", "int8:g8:recent=3"),
        ("gemma3_text", "int4:head:rotated:recent=4"),
        ("gemma3_text", "int4:head:recent=16"),
    ],
)
def test_logits_are_those_of_simulated_codes(family: str, kv_cache: str, engine_of: Callable[..., Path]) -> None:
    """Gemma's layers with a window of 6 have codes of older rows beside 4 exact ones, and none beside 16."""
    model, path = tiny_model(family), engine_of(kv_cache, family)
    ours = logits(path)
    assert difference(ours, rounded_logits(model, TOKENS, kv_cache)) < SIMULATED
    of_codes = kv_cache.rpartition(":recent=")[0]
    if not kv_cache.startswith("int8:"):
        assert difference(ours, rounded_logits(model, TOKENS, of_codes)) > WITHOUT
    for chunk in (1, 5):
        assert np.array_equal(logits(path, chunk), ours)


@pytest.mark.parametrize("rows", [8, 21, 24, 40])
def test_pinned_rows_are_read_before_the_window(rows: int, tmp_path: Path) -> None:
    """A window of 21 rows and 11 pinned ones. Where the newest rows contain the window, the cache has no codes."""
    model, tokens = tiny_checkpoint("llama", tmp_path / "model"), TOKENS[:100]
    found = {}
    for target in ("cpu", "reference"):
        path = tmp_path / f"{target}.llmc"
        passes = llmc.passes.extended(keep_less(SinksAndRecent(11, 21)))
        limits: dict[str, Any] = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256, "block_size": 8}
        for kv_cache in (f"int4:head:recent={rows}", "auto"):
            llmc.build(model, path, target=target, passes=passes, dtype="float32", kv_cache=kv_cache, **limits)
            with llmc.load(path, threads=1) as engine:
                found[target, kv_cache == "auto"] = engine.logits(tokens)
    assert difference(found["cpu", False], found["reference", False]) < SIMULATED
    assert np.array_equal(found["cpu", False], found["cpu", True]) == (rows >= 21)


@pytest.mark.parametrize("family", ["bloom", "gpt_oss", "llama4_text", "mistral"])
def test_other_scores_are_those_of_the_reference(family: str, engine_of: Callable[..., Path]) -> None:
    """Slopes, sinks, chunks of 4 and windows of 6."""
    path, reference = (engine_of("int4:head:recent=3", family, target) for target in ("cpu", "reference"))
    ours = logits(path)
    assert difference(ours, logits(reference)) < SIMULATED
    assert np.array_equal(logits(path, 5), ours)


def test_a_context_without_older_rows_has_the_bits_of_a_cache_without_codes(engine_of: Callable[..., Path]) -> None:
    assert np.array_equal(logits(engine_of("int4:head:recent=200")), logits(engine_of("auto")))


def answers(engine: Engine) -> list[object]:
    """Texts of neighbours with their log-probabilities, choices that fork, and logits."""
    forks = engine.generate([TOKENS[:70]], max_tokens=40, n=3, temperature=1.0, seed=3)
    texts = engine.generate(PROMPTS, max_tokens=100, logprobs=1, ignore_eos=True)
    chosen = [[(c.token_ids, repr(c.logprobs)) for c in answer.choices] for answer in (*texts, *forks)]
    return [*chosen, engine.logits(TOKENS).tolist()]


@pytest.mark.parametrize(
    ("family", "kv_cache", "groups"),
    [
        ("llama", "int4:head:rotated:recent=21", ["nearest:window=21"]),
        ("gemma3_text", "int8/int4:head:recent=4", ["nearest:window=6", "nearest:window=4"]),
    ],
)
def test_bits_are_the_same_in_any_company(
    family: str, kv_cache: str, groups: list[str], engine_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found prefixes, forks, chunks, drafts that are rejected, preemption and a second tier; and as if nothing were
    given back."""
    path = engine_of(kv_cache, family)
    with llmc.load(path, threads=1) as engine:
        expected = answers(engine)
        hits = engine.loop.scheduler.prefix_cache.hits
        assert answers(engine) == expected
        assert engine.loop.scheduler.prefix_cache.hits > hits, "no prefix was found"
        assert [str(group.built) for group in engine.loop.groups] == groups
        assert all(group.pool.count < engine.loop.pool.count and not group.pool.used for group in engine.loop.groups)
    assert_alike(path, answers, expected)
    tight = least_cache_bytes(path)
    tiers: list[Mapping[str, Any]] = [{}, {"kv_offloading_size": "4MB"}]
    for tier in tiers:
        with llmc.load(path, kv_cache_bytes=tight, **tier) as engine:
            assert answers(engine) == expected
            assert engine.loop.scheduler.preemptions

    def keeping_all(place: Path, *, check_weights: bool) -> object:
        directory, check = engine_to_run(place, check_weights=check_weights)
        return directory.with_one_table(), check

    monkeypatch.setattr(loading, "engine_to_run", keeping_all)
    with llmc.load(path, threads=1) as engine:
        assert answers(engine) == expected


def test_what_newest_rows_hold_is_told(engine_of: Callable[..., Path]) -> None:
    program = engine_to_run(engine_of("int4:head:recent=21"), check_weights=False)[0].program
    assert program.token_bytes() == (2 * 2 * 2 * (8 + 4), 2 * 2 * 2 * 16 * 4)
    assert cache_text(program) == "608 B per token, 512 B of it kept by nearest:window=21"


@pytest.mark.parametrize(
    ("kv_cache", "target", "problem"),
    [
        ("int4:head:recent=0", "cpu", "recent=0 is not a whole number from 1 to 999999999"),
        ("int4:head:recent=many", "cpu", "recent=many is not a whole number"),
        ("auto:recent=128", "cpu", "recent=128 keeps the newest rows exact next to codes, and 'auto' has none"),
        ("bfloat16:recent=128", "cpu", "'bfloat16' has none"),
        ("int4:recent=128:rotated", "cpu", "recent=128:rotated is not a whole number"),
        ("int4:recent=1000000000", "cpu", "recent=1000000000 is not a whole number from 1 to 999999999"),
        ("int4:recent=-1", "cpu", "recent=-1 is not a whole number"),
        ("int4:recent=\u0661\u0662", "cpu", "recent=\u0661\u0662 is not a whole number"),
        pytest.param("int4:recent=" + "9" * 5000, "cpu", "is not a whole number", id="5000 digits"),
        ("int4:head:recent=128", "onnxruntime", "have no int4:head:recent=128 codes in their caches"),
    ],
)
def test_what_cannot_be_is_refused(kv_cache: str, target: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=problem):
        llmc.build(
            tiny_checkpoint("llama", tmp_path / "model"),
            tmp_path / "engine.llmc",
            target=target,
            kv_cache=kv_cache,
            block_size=8,
        )
