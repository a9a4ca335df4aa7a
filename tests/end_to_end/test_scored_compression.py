"""Policies that keep rows by score: what is said, in which company, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.errors import LlmcError, OptionError, RequestError
from llmc.program import H2O, CachePolicy, ChoosingHeads, Compactor, KVzip, Lru, Scored, SnapKV, TriAttention
from llmc.runtime.engine import Engine
from llmc.runtime.requests.completion import Choice
from tests.end_to_end.calibration_queries import write_calibration
from tests.end_to_end.company import assert_alike, least_cache_bytes
from tests.end_to_end.published_cuts import published_cuts
from tests.end_to_end.reference_answer import ReferenceAnswer
from tests.end_to_end.scored_reference import greedy
from tests.end_to_end.stored_rows import stored_rows
from tests.end_to_end.test_kv_compression import built, model
from tests.end_to_end.watched_cuts import watch_cuts
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

__all__ = ["built", "model"]

SNAPKV = "snapkv:budget=48,window=16,every=16,sinks=2"
H2O_TEXT = "h2o:budget=48,every=16,sinks=2,recent=16"
COMPACTOR = "compactor:budget=80,every=16,sinks=3,recent=2,chunk=32"
KVZIP = "kvzip:budget=48,every=16,sinks=2,chunk=40"
LRU = "lru:budget=48,every=16,sinks=8,recent=16"
TRIATTENTION = "triattention:budget=16,every=16,sinks=2,recent=8"
COUNTED = "triattention:budget=48,every=16,sinks=2,recent=16,pinned=0"
TOGETHER = "triattention:budget=16,every=16,sinks=2,recent=8,heads=all"
BY_KV_HEAD = "triattention:budget=48,every=16,sinks=2,recent=16,pinned=0,heads=kv_head"
POLICIES: dict[str, Scored] = {
    SNAPKV: SnapKV(budget=48, every=16, sinks=2, block=8, window=16),
    H2O_TEXT: H2O(budget=48, every=16, sinks=2, block=8, recent=16),
    COMPACTOR: Compactor(budget=80, every=16, sinks=3, block=8, recent=2, chunk=32),
    KVZIP: KVzip(budget=48, every=16, sinks=2, block=8, chunk=40),
    LRU: Lru(budget=48, every=16, sinks=8, block=8, recent=16),
    TRIATTENTION: TriAttention(budget=16, every=16, sinks=2, block=8, recent=8),
    COUNTED: TriAttention(budget=48, every=16, sinks=2, block=8, recent=16, pinned=0),
    TOGETHER: TriAttention(budget=16, every=16, sinks=2, block=8, recent=8, heads=ChoosingHeads.ALL),
    BY_KV_HEAD: TriAttention(budget=48, every=16, sinks=2, block=8, recent=16, pinned=0, heads=ChoosingHeads.KV_HEAD),
}
# Log-probabilities, with keys and values that differ in their last bits, and then in a code or scale now and then.
ROUNDED = 1e-2
# Kernels that choose rows take one format for keys and values, and kvzip keeps no number of newest rows.
FORMATS = [
    (text, cache)
    for text in POLICIES
    for cache in (
        *("bfloat16", "int8", "int8:g8", "int8:rotated", "fp8", "fp8:g8:rotated", "int4:head", "int4:g8"),
        *("int4:head:rotated", *(("int4:head:rotated:recent=2",) if text != KVZIP else ())),
    )
]
QUICK_FORMATS = [
    *((text, cache) for text in POLICIES for cache in ("int8", "int4:head:rotated")),
    *((SNAPKV, "bfloat16"), (H2O_TEXT, "int4:head:rotated:recent=2"), (KVZIP, "fp8"), (COUNTED, "int4:g8")),
]
each_policy = pytest.mark.parametrize(
    "text",
    POLICIES,
    ids=lambda text: "-".join((text.partition(":")[0], *re.findall("pinned=0|heads=.*", text))),
)
TOKENS = tiny_tokens(200)


def said(engine: Engine, **options: Any) -> list[object]:
    """Tokens and log-probabilities of neighbours that share a prefix, and of choices that fork."""
    prompts = [TOKENS[:100], TOKENS[:100], [*TOKENS[:80], 5, 6], TOKENS[:30]]
    texts = engine.generate(prompts, max_tokens=60, logprobs=0, ignore_eos=True, **options)
    forks = engine.generate([TOKENS[:90]], max_tokens=30, n=3, temperature=1.0, seed=3, **options)
    return [(choice.token_ids, repr(choice.logprobs)) for answer in (*texts, *forks) for choice in answer.choices]


@each_policy
@pytest.mark.parametrize("target", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_answers_are_those_of_the_published_algorithm(
    text: str, target: str, built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 1 and 5 and whole: a prompt is read whole before rows are chosen, however it comes."""
    expected, path = greedy(POLICIES[text], TOKENS[:100], 60), built(kv_compression=text, target=target)
    for chunk in (1, 5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            assert_answers(engine, expected, monkeypatch)
            (plain,) = engine.generate([TOKENS[:100]], max_tokens=60, ignore_eos=True, kv_compression="none")
        assert list(plain.choices[0].token_ids) != expected.tokens


def assert_answers(engine: Engine, expected: ReferenceAnswer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare an answer and the rows that each cut keeps."""
    seen, count = watch_cuts(engine, monkeypatch), len(expected.tokens)
    (answer,) = engine.generate([TOKENS[:100]], max_tokens=count, logprobs=0, ignore_eos=True)
    group = engine.loop.groups[0]
    assert group.stats.dropped and not group.pool.used, "nothing was evicted"
    assert [each.kept for each in seen if each.kept is not None] == expected.kept
    assert_close_choice(answer.choices[0], expected)


def assert_close_choice(choice: Choice, expected: ReferenceAnswer, bound: float = 2e-3) -> None:
    """Compare tokens, and their log-probabilities within a bound."""
    assert list(choice.token_ids) == expected.tokens and choice.logprobs is not None
    np.testing.assert_allclose([each.logprob for each in choice.logprobs], expected.logprobs, atol=bound)


def test_queries_are_measured_behind_their_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 norms queries before it rotates them; without that norm, other rows would stay."""
    expected = greedy(POLICIES[TRIATTENTION], TOKENS[:100], 60, "qwen3")
    path = tmp_path / "engine.llmc"
    model = tiny_checkpoint("qwen3", tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "block_size": 8, "max_model_len": 256, "target": "cpu"}
    llmc.build(model, path, kv_compression=TRIATTENTION, **options, **write_calibration(tmp_path))
    with llmc.load(path, threads=1) as engine:
        assert_answers(engine, expected, monkeypatch)


def test_a_pinned_prompt_s_blocks_stay_shared(built: Callable[..., Path]) -> None:
    """Two requests with one prompt are cut several times, and a third one still finds the prompt."""
    with llmc.load(built(kv_compression=TRIATTENTION, target="cpu"), threads=1) as engine:
        first = engine.generate([TOKENS[:96], TOKENS[:96]], max_tokens=60, ignore_eos=True)
        assert engine.loop.groups[0].stats.dropped
        before = engine.loop.scheduler.prefix_cache.hits
        (again,) = engine.generate([TOKENS[:96]], max_tokens=60, ignore_eos=True)
        assert engine.loop.scheduler.prefix_cache.hits > before
        assert len({answer.choices[0].token_ids for answer in (*first, again)}) == 1


@each_policy
def test_bits_are_the_same_in_any_company(text: str, built: Callable[..., Path]) -> None:
    """Found prefixes, chunks, threads, drafts and preemption change nothing."""
    path = built(kv_compression=text, target="cpu")
    with llmc.load(path, threads=1) as engine:
        expected = said(engine)
        assert said(engine) == expected and engine.loop.scheduler.prefix_cache.hits
    others: list[Mapping[str, Any]] = [
        {"max_step_tokens": 5, "threads": 2, "prefix_cache": False},
        {"speculation": {"method": "lookahead"}},
    ]
    for options in others:
        with llmc.load(path, **options) as engine:
            assert said(engine) == expected, options
    with pytest.raises(LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, kv_cache_bytes=1)
    least = int(caught.value.problem.rsplit(" ", 1)[-1])
    for size in (None, "100MB"):
        with llmc.load(path, kv_cache_bytes=least, kv_offloading_size=size) as engine:
            assert said(engine) == expected
            assert engine.loop.scheduler.preemptions and not engine.loop.groups[0].pool.used
            tier = engine.loop.scheduler.second_tier
            assert tier is None or tier.stats.loaded_blocks, "nothing came back"


@pytest.mark.parametrize(("text", "cache"), quick_sample(FORMATS, QUICK_FORMATS))
def test_rows_are_scored_as_what_they_stand_for(
    text: str, cache: str, built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published algorithms choose the same rows of what the caches hold, and the answer is that of transformers'
    model with codes, from which the same rows leave. Rotated heads too, which keys and queries must share."""
    policy, name = POLICIES[text], "kv_dtype" if cache == "bfloat16" else "kv_cache"
    path, found = built(kv_compression=text, target="cpu", **{name: cache}), list[object]()
    for chunk in (5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            seen = watch_cuts(engine, monkeypatch, is_spread="rotated" in cache)
            (answer,) = engine.generate([TOKENS[:100]], max_tokens=30, logprobs=0, ignore_eos=True)
        kept = [each.kept for each in seen if each.kept is not None]
        found.append((kept, answer.choices[0].token_ids, repr(answer.choices[0].logprobs)))
    assert found[0] == found[1]
    assert kept and kept == published_cuts(policy, 100, seen)
    expected = greedy(policy, TOKENS[:100], 30, stored=stored_rows(cache), kept=kept)
    assert_close_choice(answer.choices[0], expected, ROUNDED)


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        (SNAPKV, "int4:head:rotated"),
        (KVZIP, "int8"),
        pytest.param(H2O_TEXT, "int4:head", marks=pytest.mark.slow),
        pytest.param(COMPACTOR, "int8:rotated", marks=pytest.mark.slow),
        pytest.param(TOGETHER, "fp8", marks=pytest.mark.slow),
    ],
)
def test_bits_on_codes_are_the_same_in_any_company(text: str, cache: str, built: Callable[..., Path]) -> None:
    """Rejected drafts leave nothing in codes, and swapped codes come back as they were."""
    path = built(kv_compression=text, target="cpu", kv_cache=cache)
    with llmc.load(path, threads=1) as engine:
        expected = said(engine)
        assert engine.loop.groups[0].stats.dropped, "nothing was evicted"
    assert_alike(path, said, expected)
    least = least_cache_bytes(path)
    for size in (None, "100MB"):
        with llmc.load(path, kv_cache_bytes=least, kv_offloading_size=size) as engine:
            assert said(engine) == expected and engine.loop.scheduler.preemptions


@each_policy
def test_a_prefix_is_not_answered_by_compacted_blocks(text: str, built: Callable[..., Path]) -> None:
    """A request that keeps everything finds the blocks of one that was compacted, as they were before."""
    path = built(kv_compression=text, target="cpu")
    with llmc.load(path, threads=1) as engine:
        plain = said(engine, kv_compression="none")
    with llmc.load(path, threads=1) as engine:
        said(engine)
        assert said(engine, kv_compression="none") == plain and engine.loop.scheduler.prefix_cache.hits


@pytest.mark.parametrize(
    ("text", "full"),
    [
        (SNAPKV, "snapkv:budget=248,window=16,sinks=2"),
        (SNAPKV, "snapkv:share=100,window=16,every=128,sinks=2"),
        (H2O_TEXT, "h2o:budget=248,every=16,sinks=2,recent=16"),
        (COMPACTOR, "compactor:budget=248,every=16,sinks=3,recent=2,chunk=32"),
        (KVZIP, "kvzip:budget=248,every=16,sinks=2"),
        (KVZIP, "kvzip:share=100,every=16,sinks=2"),
        (LRU, "lru:budget=248,every=16,sinks=8,recent=16"),
        (TRIATTENTION, "triattention:budget=248,every=16,sinks=2,recent=8"),
        (TRIATTENTION, "triattention:budget=248,every=16,sinks=2,recent=8,pinned=0"),
        (TOGETHER, "triattention:budget=248,every=16,sinks=2,recent=8,pinned=0,heads=all"),
    ],
)
def test_a_full_budget_changes_no_bit(text: str, full: str, built: Callable[..., Path]) -> None:
    with llmc.load(built(kv_compression=text, target="cpu"), threads=1) as engine:
        assert said(engine, kv_compression=full) == said(engine, kv_compression="none")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("snapkv:budget=16,window=16", "leaves no room in addition to the 16 protected rows (0 first ones, 16 last"),
        ("snapkv:budget=48,share=50", "budget=48 and share=50 contradict each other"),
        ("snapkv:window=16", "it lacks budget or share"),
        ("snapkv:share=0", "share=0 is not a percentage from 1 to 100"),
        ("snapkv:share=50,pool=4", "pool=4 is not an odd number"),
        ("snapkv:share=50,window=200", "window=200 is not a number of queries from 1 to 128"),
        ("snapkv:budget=50,window=16,every=16,sinks=2", "budget=50 is not a multiple of block_size=8"),
        ("snapkv:share=50,window=32", "pool=5: window=16, sinks=2 cannot change"),
        ("snapkv:share=50,window=16,every=16,sinks=2,block=16", "blocks have 8 rows"),
        ("h2o:budget=48,recent=16,every=16,sinks=2", "cannot run h2o:budget=48"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str, problem: str, built: Callable[..., Path]) -> None:
    path = built(kv_compression=SNAPKV, target="cpu")
    with pytest.raises(OptionError) as caught:
        llmc.load(path, kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix
    with llmc.load(path, threads=1) as engine, pytest.raises(RequestError) as asked:
        engine.generate([TOKENS], kv_compression=text)
    assert problem in asked.value.problem


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("snapkv:budget=16", "give budget=72 or more, or protect fewer rows"),
        ("snapkv", "add budget=NUMBER, or share=NUMBER for percent of the prompt"),
        (
            "snapkv:share=50,window=32",
            "give kv_compression=snapkv:share=50,every=128,sinks=2,window=16,pool=5, or build",
        ),
        (
            "snapkv:budget=40,window=17,every=8,sinks=20",
            "give kv_compression=snapkv:budget=40,every=8,sinks=2,window=16,pool=5",
        ),
    ],
)
def test_refusals_name_what_the_engine_runs(text: str, fix: str, built: Callable[..., Path]) -> None:
    path = built(kv_compression=SNAPKV, target="cpu")
    with pytest.raises(OptionError) as caught:
        llmc.load(path, kv_compression=text)
    assert caught.value.fix is not None and fix in caught.value.fix
    with llmc.load(path, threads=1) as engine:
        if fix.startswith("give kv_compression="):
            named = caught.value.fix.removeprefix("give kv_compression=").partition(", or build")[0]
            assert engine.generate([TOKENS[:20]], max_tokens=1, kv_compression=named)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h2o:budget=64", "leaves no room in addition to the 64 protected rows (0 first ones, 64 last"),
        ("h2o:share=50,every=160", "every=160 is not a number of queries from 1 to 128"),
        ("h2o:share=50,recent=16,sinks=2,every=8", "cannot run h2o:share=50"),
        ("snapkv:share=50", "cannot run snapkv:share=50"),
        (LRU, "cannot run lru:budget=48"),
    ],
)
def test_options_of_h2o_are_checked(text: str, problem: str, built: Callable[..., Path]) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.load(built(kv_compression=H2O_TEXT, target="cpu"), kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("compactor:budget=8,every=8", "leaves no room in addition to the 12 protected rows (8 first ones, 4 last"),
        ("compactor:share=50,recent=0", "recent=0 must be 1 or more"),
        ("compactor:share=50,chunk=264", "chunk=264 is not a number of queries from 1 to 256"),
        ("compactor:share=50,chunk=64", "every=128 is more than chunk=64, whose queries are kept"),
        ("compactor:share=50,every=16,sinks=3,recent=2,chunk=64", "cannot run compactor:share=50"),
        (SNAPKV, "cannot run snapkv:budget=48"),
    ],
)
def test_options_of_compactor_are_checked(text: str, problem: str, built: Callable[..., Path]) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.load(built(kv_compression=COMPACTOR, target="cpu"), kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lru:budget=64,sinks=8", "leaves no room in addition to the 72 protected rows"),
        ("lru:budget=48,every=16,sinks=2,recent=16", "sinks=2 is not a multiple of block_size=8"),
        ("lru:budget=48,every=16,sinks=8,recent=12", "recent=12 is not a multiple of block_size=8"),
    ],
)
def test_options_of_lru_are_checked(text: str, problem: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.build(model, tmp_path / "engine.llmc", block_size=8, kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("triattention:share=50,recent=8", "share=50 counts rows of the prompt, all of which stay"),
        ("triattention:budget=48,pinned=2", "pinned=2 is neither 0 nor 1"),
        ("triattention:budget=16,recent=16", "leaves no room in addition to the 16 protected rows (0 first ones, 16 l"),
        ("triattention:budget=50,every=16,sinks=2,recent=8", "budget=50 is not a multiple of block_size=8"),
        ("triattention:budget=48,every=16,sinks=2,recent=16", "cannot run triattention:budget=48"),
        (TOGETHER, "cannot run triattention:budget=16"),
        (
            "triattention:budget=48,heads=each",
            "'heads=each' is not one of heads=all, heads=kv_head, heads=layer",
        ),
        (SNAPKV, "cannot run snapkv:budget=48"),
    ],
)
def test_options_of_triattention_are_checked(text: str, problem: str, built: Callable[..., Path]) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.load(built(kv_compression=TRIATTENTION, target="cpu"), kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix


def test_a_request_chooses_what_heads_together_keep(built: Callable[..., Path]) -> None:
    """Other budgets and steps, and pinned prompts or none, but not other heads."""
    with llmc.load(built(kv_compression=TOGETHER, target="cpu"), threads=1) as engine:
        for text in (TOGETHER, "triattention:budget=40,every=8,sinks=2,recent=8,pinned=0,heads=all"):
            policy = CachePolicy.from_text(text).fitted(8)
            assert isinstance(policy, TriAttention)
            (answer,) = engine.generate([TOKENS[:100]], max_tokens=60, ignore_eos=True, kv_compression=text)
            assert list(answer.choices[0].token_ids) == greedy(policy, TOKENS[:100], 60).tokens
        for other in ("", ",heads=kv_head"):
            text = f"triattention:budget=40,every=8,sinks=2,recent=8{other}"
            with pytest.raises(RequestError, match=r"the engine was built for .*heads=all, which cannot run triattent"):
                engine.generate([TOKENS[:100]], kv_compression=text)


def test_triattention_needs_a_calibration_text(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"kv_compression=triattention.* needs activations, but no calibration text"):
        llmc.build(model, tmp_path / "engine.llmc", block_size=8, kv_compression=TRIATTENTION)


def test_chunks_are_whole_blocks(model: Path, tmp_path: Path) -> None:
    text = "compactor:share=50,every=8,chunk=36"
    with pytest.raises(OptionError, match="chunk=36 is not a multiple of block_size=8"):
        llmc.build(model, tmp_path / "engine.llmc", block_size=8, kv_compression=text)
