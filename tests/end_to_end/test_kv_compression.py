"""The option kv_compression: of a build, of a load and of each request, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.engine_format.reader import read_engine
from llmc.errors import BuildWarning, LlmcError, LoadWarning, OptionError, RequestError
from llmc.program import H2O, CachePolicy, fitted_compression, parse_compression
from llmc.runtime.engine import Engine
from tests.end_to_end.calibration_queries import write_calibration
from tests.end_to_end.logits import assert_close
from tests.end_to_end.plain_codes import rounded_logits
from tests.end_to_end.test_cache_policies import masked_logits
from tests.end_to_end.test_newest_rows import SIMULATED, difference
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

STRIDE = "stride:step=3,recent=16,sinks=8,rows=8"
OTHER = "stride:step=2,recent=32,rows=16"
TOKENS = tiny_tokens(200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("compressed") / "model")


@pytest.fixture(scope="module")
def built(model: Path) -> Callable[..., Path]:
    """An engine with these options, built once."""

    def engine(**options: Any) -> Path:
        path = model.parent / ("-".join(str(value).replace(":", "_") for value in options.values()) + ".llmc")
        if not path.exists():
            limits: dict[str, Any] = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256}
            llmc.build(
                model, path, dtype="float32", block_size=8, **limits, **write_calibration(model.parent), **options
            )
        return path

    return engine


def said(engine: Engine, **options: Any) -> list[tuple[int, ...]]:
    answers = engine.generate([TOKENS[:100], TOKENS[:60]], max_tokens=60, ignore_eos=True, **options)
    return [answer.choices[0].token_ids for answer in answers]


def test_build_load_and_request_choose(built: Callable[..., Path]) -> None:
    path = built(kv_compression=STRIDE)
    with llmc.load(path, threads=1) as engine:
        own, other, plain = (said(engine, kv_compression=text) for text in (None, OTHER, "none"))
        assert own != plain and other not in (own, plain)
        assert said(engine, kv_compression=STRIDE) == own
        assert_close(engine.logits(TOKENS), masked_logits(CachePolicy.from_text(STRIDE), TOKENS))
        (group,) = engine.loop.groups
        assert group.stats.dropped and group.stats.kept
    with llmc.load(path, threads=1, kv_compression=OTHER) as engine:
        assert said(engine) == other and said(engine, kv_compression=STRIDE) == own
        assert_close(engine.logits(TOKENS), masked_logits(CachePolicy.from_text(OTHER), TOKENS))
    with llmc.load(path, threads=1, kv_compression="none") as engine:
        assert said(engine) == plain


@pytest.mark.parametrize(
    ("text", "smaller"),
    [
        ("stride:step=4,recent=512", "step, recent or rows"),
        ("snapkv:budget=512", "budget"),
        ("h2o:budget=256", "budget"),
        ("kvzip:share=100", "share"),
    ],
)
def test_a_policy_that_drops_nothing_is_told(text: str, smaller: str, model: Path, tmp_path: Path) -> None:
    """At build, and where a load asks for it, but not where a request does."""
    path, limits = tmp_path / "engine.llmc", dict[str, Any](max_model_len=256, block_size=8)
    with pytest.warns(BuildWarning, match="has no effect") as caught:
        report = llmc.build(model, path, target="reference", kv_compression=text, **limits)
    (warning,) = report.warnings
    assert [str(each.message) for each in caught] == [warning]
    assert warning.startswith(f"kv_compression={text}")
    assert f"up to 256 tokens (max_model_len). Give a smaller {smaller}" in warning
    with pytest.warns(LoadWarning, match="has no effect"):
        llmc.load(path, kv_compression=text).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with llmc.load(path) as engine:
            engine.generate([[1, 2, 3]], max_tokens=1, kv_compression=text)


def test_a_budget_that_is_not_reached_changes_no_bit(built: Callable[..., Path]) -> None:
    with llmc.load(built(kv_compression="none"), threads=1) as engine:
        expected = engine.logits(TOKENS)
        with pytest.raises(RequestError, match="the engine was built without KV compression"):
            engine.generate([TOKENS], kv_compression=STRIDE)
        with pytest.raises(RequestError, match="recent=12 is not a multiple of block_size=8"):
            engine.generate([TOKENS], kv_compression="stride:step=2,recent=12")
    unreached = "stride:step=2,recent=256"
    with (
        pytest.warns(LoadWarning, match="has no effect"),
        llmc.load(built(kv_compression=STRIDE), threads=1, kv_compression=unreached) as engine,
    ):
        assert (engine.logits(TOKENS) == expected).all()


FORMATS = [
    *("bfloat16", "int8", "int8:g8", "int8:rotated", "fp8", "fp8:g8:rotated", "int4:head", "int4:g8"),
    *("int4:head:rotated", "int8/int4:head:rotated"),
]


@pytest.mark.parametrize("cache", quick_sample(FORMATS, ["int8", "fp8", "int4:head"]))
def test_codes_move_as_they_are(cache: str, built: Callable[..., Path]) -> None:
    """Logits are those of the mask over codes, and tokens are the same, however the prompt comes in chunks."""
    option = "kv_dtype" if cache == "bfloat16" else "kv_cache"
    path, found = built(kv_compression=STRIDE, **{option: cache}), []
    expected = rounded_logits(tiny_model("llama"), TOKENS, cache, CachePolicy.from_text(STRIDE))
    for chunk in (1, 5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            found.append(said(engine))
            assert engine.loop.groups[0].stats.dropped
            assert difference(engine.logits(TOKENS), expected) < SIMULATED
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("codes", ["int8", "int4:head"])
def test_no_step_decodes_a_cache(codes: str, model: Path, tmp_path: Path) -> None:
    """A decoded copy of keys and values would take memory that grows with the longest sequence."""
    arenas = []
    for longest in (64, 256):
        path = tmp_path / f"{longest}.llmc"
        llmc.build(model, path, max_batch_tokens=64, max_model_len=longest, kv_cache=codes)
        arenas.append(read_engine(path).program.arena)
    assert arenas[0] == arenas[1]


@pytest.mark.parametrize("codes", ["auto", "int8"])
@pytest.mark.parametrize(
    ("text", "same", "longer"), [(STRIDE, 136, 176), ("streaming:budget=48,sinks=3,every=16", 136, 136)]
)
def test_the_next_request_begins_behind_the_cuts(
    text: str, same: int, longer: int, codes: str, built: Callable[..., Path]
) -> None:
    """The same prompt, and the next turn of the conversation: bits are those of requests that compute everything."""
    path, turns = built(kv_compression=text, kv_cache=codes), [TOKENS[:150], TOKENS[:150]]
    with llmc.load(path, threads=1, prefix_cache=False) as engine:
        turns.append([*TOKENS[:150], *bits(engine, turns[0])[0], 5, 6, 7])
        expected = [bits(engine, turn) for turn in turns]
    with llmc.load(path, threads=1) as engine:
        found, hits = [], [0]
        for turn in turns:
            found.append(bits(engine, turn))
            hits.append(engine.loop.scheduler.prefix_cache.hits)
        plain = bits(engine, turns[2], "streaming:budget=32,sinks=3,every=8" if "sinks=3" in text else "none")
    assert found == expected != [plain]
    assert [end - begin for begin, end in pairwise(hits)] == [0, same, longer]
    with llmc.load(path, threads=1, prefix_cache=False) as engine:
        other = "streaming:budget=32,sinks=3,every=8" if "sinks=3" in text else "none"
        assert bits(engine, turns[2], other) == plain, "another policy has found these rows"


def bits(engine: Engine, prompt: list[int], text: str | None = None) -> tuple[tuple[int, ...], str]:
    """Tokens and log-probabilities of an answer."""
    (answer,) = engine.generate([prompt], max_tokens=32, logprobs=0, ignore_eos=True, kv_compression=text)
    return answer.choices[0].token_ids, repr(answer.choices[0].logprobs)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "strides:step=2,recent=8",
            "'strides' is not a policy. Policies: none, compactor, h2o, kvzip, lru, snapkv, st",
        ),
        ("", "'' is not a policy"),
        ("none:step=2", "none has no options"),
        ("stride:step=2,recent=8,step=3", "gives step twice"),
        ("stride:step=٢,recent=8", "'step=٢' is not OPTION=NUMBER"),
        ("stride:step=2", "it lacks recent"),
        ("stride", "it lacks step and recent"),
        ("stride:step=1,recent=8", "step=1 drops nothing"),
        ("stride:step=2,recent=0", "recent=0 and rows=128 must be 1 or more"),
        ("stride:step=2,recent=half", "'recent=half' is not OPTION=NUMBER with an option of stride"),
        ("nearest:window=8", "'nearest' is not a policy"),
        ("stride:step=2,recent=12", "recent=12 is not a multiple of block_size=8"),
        ("stride:step=2,recent=8,rows=1000000000000", "is not a number up to 2147483647, the most rows of a cache"),
        (f"streaming:budget={10**20}", "is not a number up to 2147483647"),
        (f"snapkv:budget={'8' * 5000}", "is not a number up to 2147483647"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str, problem: str, model: Path, built: Callable[..., Path]) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.build(model, model.parent / "refused.llmc", block_size=8, kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix
    path = built(kv_compression=STRIDE)
    with pytest.raises(OptionError) as caught:
        llmc.load(path, kv_compression=text)
    assert problem in caught.value.problem and caught.value.fix
    with llmc.load(path, threads=1) as engine, pytest.raises(RequestError) as asked:
        engine.generate([TOKENS], kv_compression=text)
    assert problem in asked.value.problem and asked.value.fix


def test_the_fix_for_an_engine_without_the_policy_fits_any_block_size(built: Callable[..., Path]) -> None:
    with llmc.load(built(kv_compression=STRIDE), threads=1) as engine, pytest.raises(RequestError) as caught:
        engine.generate([TOKENS], kv_compression="h2o:share=50,every=16,recent=16")
    assert "block=" not in str(caught.value) and caught.value.fix is not None
    text = caught.value.fix.removeprefix("build with kv_compression=")
    assert fitted_compression(text, 16) == H2O(share=50, every=16, recent=16)


LARGE = 2**31 - 128


@pytest.mark.parametrize(
    "text",
    [
        f"stride:step=2,recent=8,rows={LARGE}",
        f"stride:step={LARGE},recent={LARGE},sinks={LARGE},rows={LARGE}",
        f"streaming:budget={LARGE},every={LARGE}",
    ],
)
def test_numbers_that_no_sequence_reaches_cost_nothing(text: str, model: Path, tmp_path: Path) -> None:
    """A list of the rows that a cut moves would not fit into memory."""
    path, limits = tmp_path / "engine.llmc", dict[str, Any](max_model_len=64, block_size=8, max_batch_tokens=64)
    with pytest.warns(BuildWarning, match="has no effect"):
        llmc.build(model, path, target="reference", kv_compression=text, **limits)
    with pytest.warns(LoadWarning, match="has no effect"), llmc.load(path, kv_compression=text) as engine:
        (answer,) = engine.generate([TOKENS[:40]], max_tokens=2, kv_compression=text)
        assert len(answer.choices[0].token_ids) == 2 and engine.logits(TOKENS[:40]).shape[0] == 40


@pytest.mark.parametrize(
    ("family", "text"),
    [("bloom", "snapkv:share=50"), ("bloom", "stride:step=2,recent=16"), ("bloom", "triattention:budget=64")],
)
def test_scores_by_distance_are_refused_once(family: str, text: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model")
    with pytest.raises(OptionError, match="adds slopes to scores") as caught:
        llmc.build(checkpoint, tmp_path / "engine.llmc", kv_compression=text, **write_calibration(tmp_path))
    assert str(caught.value).count("slopes") == 1 and caught.value.fix == "build without kv_compression"


@pytest.mark.parametrize(
    ("text", "fix"), [("SnapKV:budget=48", "did you mean 'snapkv'?"), ("None", "did you mean 'none'?")]
)
def test_names_in_capitals_are_told(text: str, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_compression(text)
    assert fix in str(caught.value.fix)


def test_a_draft_model_beside_compression_is_refused(built: Callable[..., Path]) -> None:
    plain, compressed = built(kv_compression="none"), built(kv_compression=STRIDE)
    draft = {"method": "draft_model", "model": str(plain), "num_speculative_tokens": 3}
    with pytest.raises(LlmcError, match="its drafter keeps every position"):
        llmc.load(compressed, speculation=draft)
