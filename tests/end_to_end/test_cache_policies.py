"""Two cache policies from outside (tests/cache_policies): answers are those of a model with the equivalent mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llmc
from llmc import SamplingParams
from llmc.engine_format.reader import engine_to_run
from llmc.errors import PassError
from llmc.program import CachePolicy, Stride
from llmc.runtime import loading
from llmc.runtime.engine import Engine
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.keep_less import keep_less
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.end_to_end.company import assert_alike, least_cache_bytes
from tests.end_to_end.logits import Logits, assert_close
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

MASKED, CUT = SinksAndRecent(11, 21), EveryOtherBlock(8, 6, 2)
STRIDE = Stride(step=3, recent=16, sinks=8, rows=8)
POLICIES = pytest.mark.parametrize("policy", [MASKED, CUT, STRIDE], ids=lambda policy: policy.NAME)
TOKENS = tiny_tokens(200)
PROMPTS = [*(TOKENS[:n] for n in (5, 33, 48, 64, 120)), [*TOKENS[:60], *TOKENS[20::-1]], TOKENS[:120]]


def build(model: Path, path: Path, policy: CachePolicy, target: str = "cpu", block_size: int = 8) -> None:
    """An engine in fp32 whose caches keep what the policy says."""
    passes = llmc.passes.extended(keep_less(policy))
    limits = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256, "block_size": block_size}
    options: dict[str, Any] = {"dtype": "float32", **limits}
    llmc.build(model, path, target=target, passes=passes, **options)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An engine of a policy, built once."""
    folder = tmp_path_factory.mktemp("policies")
    model = tiny_checkpoint("llama", folder / "model")

    def engine(policy: CachePolicy, target: str = "cpu") -> Path:
        path = folder / f"{policy.NAME}-{target}.llmc"
        if not path.exists():
            build(model, path, policy, target)
        return path

    return engine


def masked_logits(policy: CachePolicy, tokens: list[int], model: Any = None) -> Logits:
    """Of transformers' model, the tiny Llama unless another is given, each token seeing what the policy says."""
    mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min)
    for row, seen in zip(mask, policy.seen(len(tokens)), strict=True):
        row[seen] = 0.0
    with torch.inference_mode():
        output = (model or tiny_model("llama"))(
            torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False
        )
    logits: Logits = output.logits[0].numpy()
    return logits


def answers(engine: Engine) -> list[object]:
    """Texts of neighbours with their log-probabilities, choices that fork, and logits."""
    forks = engine.generate([TOKENS[:70]], max_tokens=40, n=3, temperature=1.0, seed=3)
    texts = engine.generate(PROMPTS, max_tokens=100, logprobs=1, ignore_eos=True)
    chosen = [[(c.token_ids, repr(c.logprobs)) for c in answer.choices] for answer in (*texts, *forks)]
    return [*chosen, engine.logits(TOKENS).tolist()]


@POLICIES
@pytest.mark.parametrize("target", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_logits_and_tokens_are_those_of_the_mask(
    policy: CachePolicy, target: str, engine_of: Callable[..., Path]
) -> None:
    path, generated = engine_of(policy, target), list[int]()
    for chunk in (1, 5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            (answer,) = engine.generate([TOKENS[:100]], max_tokens=80, ignore_eos=True)
            assert generated in ([], list(answer.choices[0].token_ids)), chunk
            generated = list(answer.choices[0].token_ids)
            assert_close(engine.logits(TOKENS), masked_logits(policy, TOKENS))
            group = engine.loop.groups[0]
            assert policy.per_request or group.pool.count < engine.loop.pool.count
            assert not group.pool.used
    whole = masked_logits(policy, [*TOKENS[:100], *generated])
    assert whole[99:-1].argmax(-1).tolist() == generated


@POLICIES
def test_bits_are_the_same_in_any_company(
    policy: CachePolicy, engine_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found prefixes, forks, chunks, drafts and preemption; and as if nothing were given back."""
    path = engine_of(policy)
    with llmc.load(path, threads=1) as engine:
        expected = answers(engine)
        hits = engine.loop.scheduler.prefix_cache.hits
        assert answers(engine) == expected
        assert engine.loop.scheduler.prefix_cache.hits > hits, "no prefix was found"
        assert not engine.loop.scheduler.preemptions, "the pool was made for as many"
    assert_alike(path, answers, expected)
    with llmc.load(path, kv_cache_bytes=least_cache_bytes(path)) as engine:
        assert answers(engine) == expected
        assert engine.loop.scheduler.preemptions and not engine.loop.groups[0].pool.used
    if not policy.drops_rows:

        def keeping_all(place: Path, *, check_weights: bool) -> object:
            directory, check = engine_to_run(place, check_weights=check_weights)
            return directory.with_one_table(), check

        monkeypatch.setattr(loading, "engine_to_run", keeping_all)
        with llmc.load(path, threads=1) as engine:
            assert engine.loop.groups[0].pool.count == engine.loop.pool.count
            assert answers(engine) == expected


@pytest.mark.slow
@POLICIES
def test_interpreted_kernels_say_the_same(policy: CachePolicy, engine_of: Callable[..., Path]) -> None:
    path = engine_of(policy, "h100")
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, n=2, ignore_eos=True)
    prompts = [TOKENS[:60], [*TOKENS[:40], 5, 6, 7], TOKENS[:60]]

    def said(engine: Engine) -> list[list[list[int]]]:
        return [[list(c.token_ids) for c in each.choices] for each in engine.generate(prompts, params)]

    with llmc.load(path, executor="reference", prefix_cache=False) as reference:
        expected = said(reference)
    with llmc.load(path, executor="triton_interpreter", speculation={"method": "lookahead"}) as engine:
        assert said(engine) == expected
        assert said(engine) == expected


def test_a_cut_inside_a_block_is_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    with pytest.raises(PassError, match="cuts tables at row 48, which is not a multiple of block_size=32"):
        build(model, tmp_path / "engine.llmc", CUT, block_size=32)


def test_scores_by_distance_and_dropped_rows_are_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint("bloom", tmp_path / "model")
    with pytest.raises(PassError, match="drops rows, but slopes count how far back a key is"):
        build(model, tmp_path / "engine.llmc", CUT)


def test_a_window_beside_a_policy_is_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint("mistral", tmp_path / "model")
    with pytest.raises(llmc.LlmcError, match="limits what a query sees, and so does window"):
        build(model, tmp_path / "engine.llmc", MASKED)
