"""The engine over a real (reference) executor: mixed batches, chunks, preemption, streaming, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.engine_format import read_engine
from llmc.errors import EngineFormatError, OptionError, RequestError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.runtime.engine import Engine
from llmc.runtime.kv_capacity import block_count, default_bytes, share_bytes
from llmc.runtime.loading import load
from llmc.runtime.requests.completion import Choice, Completion
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.tiny_engine import LIMITS, VOCAB, copied, tiny_model, tiny_program, write_tiny_engine

MODEL = tiny_model()
PROMPTS = [[5, 9, 2] * 7, [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 8], [40, 41, 42, 43], [77] * 27]
GREEDY = SamplingParams(max_tokens=12)
# One sequence of max_model_len=40 takes 5 blocks of 8 positions, each 2 heads x 8 x (4 + 4) x 4 bytes.
ONE_SEQUENCE = 5 * 512


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny.llmc", model=MODEL)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with load(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a tokenizer."""
    path = write_tiny_engine(tmp_path_factory.mktemp("engine") / "speaking.llmc", with_tokenizer=True)
    with load(path) as opened:
        yield opened


def expected(prompt: list[int], count: int = 12) -> list[int]:
    return MODEL.greedy(prompt, count)


def test_a_mixed_batch_gives_each_prompt_its_own_tokens(engine: Engine) -> None:
    completions = engine.generate(PROMPTS, GREEDY)
    assert [list(c.token_ids) for c in completions] == [expected(p) for p in PROMPTS]
    assert [c.prompt_tokens for c in completions] == [len(p) for p in PROMPTS]
    assert {c.finish_reason for c in completions} == {"length"}


@pytest.mark.parametrize("max_step_tokens", [1, 2, 5, 16])
def test_chunked_and_token_by_token_give_the_same(path: Path, max_step_tokens: int) -> None:
    with load(path, max_step_tokens=max_step_tokens) as engine:
        tokens = [list(c.token_ids) for c in engine.generate(PROMPTS, GREEDY)]
        assert tokens == [expected(p) for p in PROMPTS]
        np.testing.assert_allclose(engine.logits(PROMPTS[0]), MODEL.logits(PROMPTS[0]), atol=1e-4)


def test_preemption_does_not_change_the_tokens(path: Path) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.8, seed=i) for i in range(len(PROMPTS))]
    with load(path) as roomy:
        wanted = roomy.generate(PROMPTS, params)
    with load(path, kv_cache_bytes=ONE_SEQUENCE) as tight:
        assert tight.generate(PROMPTS, params) == wanted
        assert tight.generate(PROMPTS, GREEDY) == [tight.generate(p, GREEDY)[0] for p in PROMPTS]


def test_logits_of_one_and_of_several(engine: Engine) -> None:
    single = engine.logits(PROMPTS[2])
    assert single.dtype == np.float32 and single.shape == (11, VOCAB)
    np.testing.assert_allclose(single, MODEL.logits(PROMPTS[2]), atol=1e-4)
    several = engine.logits(PROMPTS)
    assert isinstance(several, list)
    for prompt, rows in zip(PROMPTS, several, strict=True):
        np.testing.assert_allclose(rows, MODEL.logits(prompt), atol=1e-4)


def test_each_prompt_may_have_its_own_parameters(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=i + 1, temperature=i % 2, seed=3) for i in range(len(PROMPTS))]
    together = engine.generate(PROMPTS, params)
    assert [len(c.token_ids) for c in together] == [1, 2, 3, 4, 5, 6]
    assert together == [engine.generate(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]


def test_prompts_may_be_arrays(engine: Engine) -> None:
    arrays: Any = [np.array(PROMPTS[0]), np.array(PROMPTS[1])]
    assert engine.generate(arrays, GREEDY) == engine.generate(PROMPTS[:2], GREEDY)
    assert engine.generate(arrays[0], GREEDY) == engine.generate(PROMPTS[0], GREEDY)


def test_generation_ends_at_stop_tokens_and_limits(tmp_path: Path, engine: Engine) -> None:
    tokens = expected([5, 9, 2])
    stop = tokens[4]
    first = tokens.index(stop)
    at_token = engine.generate([5, 9, 2], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert at_token == [Completion((Choice("", tuple(tokens[: first + 1]), "stop", stop),), 3)]
    with load(write_tiny_engine(tmp_path / "eos.llmc", model=MODEL, eos=(stop,))) as ending:
        assert ending.generate([5, 9, 2], GREEDY)[0].choices[0] == replace(at_token[0].choices[0], stop_reason=None)
        assert ending.generate([5, 9, 2], replace(GREEDY, ignore_eos=True))[0].token_ids == tuple(tokens)
        late = ending.generate([5, 9, 2], replace(GREEDY, min_tokens=12))[0]
        assert stop not in late.token_ids and late.finish_reason == "length"
    (full,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=500))
    assert full.prompt_tokens + len(full.token_ids) == LIMITS.max_model_len
    assert full.finish_reason == "length"


def test_text_in_text_out(speaking: Engine) -> None:
    params = SamplingParams(max_tokens=15)
    first, other = speaking.generate(["Once upon a time", "The king"], params)
    assert first == speaking.generate("Once upon a time", params)[0]
    assert first == speaking.generate(speaking.tokenize("Once upon a time"), params)[0]
    assert first.text == speaking.detokenize(first.token_ids) and len(first.text) > 15
    pieces = list(speaking.stream("The king", params))
    assert "".join(p.text for p in pieces) == other.text
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].tokens == 15
    assert sum((p.token_ids for p in pieces), ()) == other.token_ids


def test_without_a_tokenizer_tokens_are_streamed(engine: Engine) -> None:
    pieces = list(engine.stream([5, 9, 2], GREEDY))
    assert [p.token_ids for p in pieces] == [(token,) for token in expected([5, 9, 2])]
    assert [p.tokens for p in pieces] == list(range(1, 13))


def test_text_stops_before_a_stop_string(speaking: Engine) -> None:
    whole = speaking.generate("Once", SamplingParams(max_tokens=15))[0].text
    stop = whole[9:14]
    params = SamplingParams(max_tokens=15, stop=stop)
    (cut,) = speaking.generate("Once", params)
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    assert "".join(p.text for p in speaking.stream("Once", params)) == cut.text


def test_streams_and_generation_share_steps(speaking: Engine) -> None:
    params = SamplingParams(max_tokens=15)
    wanted = [speaking.generate(p, params)[0].text for p in ("A", "B", "C")]
    first, second = speaking.stream("A", params), speaking.stream("B", params)
    texts = ["", "", ""]
    texts[0] += next(first).text
    texts[1] += next(second).text
    texts[2] = speaking.generate("C", params)[0].text
    texts[0] += "".join(p.text for p in first)
    texts[1] += "".join(p.text for p in second)
    assert texts == wanted


def test_a_stream_that_is_left_early_frees_its_blocks(path: Path) -> None:
    with load(path, kv_cache_bytes=ONE_SEQUENCE) as engine:
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=19))
        next(stream)
        stream.close()
        assert list(engine.generate(PROMPTS[5], GREEDY)[0].token_ids) == expected(PROMPTS[5])


def test_save_copies_the_engine(engine: Engine, tmp_path: Path) -> None:
    saved = engine.save(tmp_path / "copy.llmc")
    assert read_engine(saved).manifest == engine.manifest
    with load(saved) as copy:
        assert copy.generate([1, 2], GREEDY) == engine.generate([1, 2], GREEDY)
        assert copy.save(saved) == saved, "onto itself"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(EngineFormatError, match="not replaced"):
        engine.save(tmp_path / "full")


def test_info_and_limits(engine: Engine, path: Path) -> None:
    assert engine.info.vocab_size == VOCAB and engine.info.dtype == "float32"
    assert engine.limits == LIMITS
    assert engine.path == path


def test_a_closed_engine_says_so(path: Path, tmp_path: Path) -> None:
    owned = ScratchDirectory(tmp_path)
    engine = load(copied(path, owned.path / "e.llmc"), owned=owned)
    stream = engine.stream([1], GREEDY)
    next(stream)
    engine.close()
    engine.close()
    assert not owned.path.exists()
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.generate([1], GREEDY)
    with pytest.raises(RequestError, match="the engine is closed"):
        next(stream)


@pytest.mark.parametrize(
    ("prompts", "params", "problem"),
    [
        ([[]], None, "the prompt is empty"),
        ([[1], []], None, "the prompt is empty"),
        ([1] * 40, None, "the prompt has 40 tokens, this engine takes at most 39 and one token of output"),
        ([1, 97], None, "token id 97 is out of range: the model has ids 0 to 96"),
        ([[1], [-1]], None, "token id -1 is out of range"),
        ([1.5], None, r"must be a whole number, not 1.5 \(float\)"),
        ([True], None, r"must be a whole number, not True \(bool\)"),
        ([[1], None], None, r"a prompt cannot be None \(NoneType\)"),
        (5, None, r"a prompt cannot be 5 \(int\)"),
        (b"bytes", None, r"a prompt cannot be b'bytes' \(bytes\)"),
        ("text", None, "the prompt is text, but the engine has no tokenizer"),
        ([1], SamplingParams(stop="x"), "stop strings need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=(97,)), "token id 97 is out of range"),
        ([1], SamplingParams(logit_bias={500: 1.0}), "token id 500 is out of range"),
        ([[1], [2]], [GREEDY], "2 prompts came with 1 sampling parameters"),
        ([1], [{"top_k": 1}], r"\{'top_k': 1\} \(dict\) is not a SamplingParams"),
    ],
)
def test_requests_that_cannot_be_served(engine: Engine, prompts: Any, params: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        engine.generate(prompts, params)
    assert caught.value.fix
    assert list(engine.generate([5, 9, 2], GREEDY)[0].token_ids) == expected([5, 9, 2]), "the engine goes on"


def test_logits_and_streams_refuse_the_same(engine: Engine) -> None:
    with pytest.raises(RequestError, match="has 41 tokens, this engine takes at most 40"):
        engine.logits([1] * 41)
    with pytest.raises(RequestError, match="token id 97"):
        engine.logits([97])
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.stream([])
    assert engine.logits([1] * 40).shape == (40, VOCAB)


def test_broken_weights_stop_their_request_only(tmp_path: Path) -> None:
    model = tiny_model()
    model.weights["embedding"][13] = float("nan")
    with load(write_tiny_engine(tmp_path / "nan.llmc", model=model)) as engine:
        with pytest.raises(RequestError, match="no usable logits") as caught:
            engine.generate([[1, 2], [13], [3]], GREEDY)
        assert caught.value.at == "prompt 1"
        assert list(engine.generate([5, 9, 2], GREEDY)[0].token_ids) == expected([5, 9, 2])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"threads": 0}, "threads cannot be 0"),
        ({"threads": 2.0}, "threads cannot be 2.0"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes cannot be 0"),
        ({"kv_cache_bytes": ONE_SEQUENCE - 1}, f"one sequence of max_model_len=40 tokens needs {ONE_SEQUENCE}"),
        ({"max_step_tokens": 17}, "max_step_tokens cannot be 17"),
        ({"kv_memory": 0}, "kv_memory cannot be 0"),
        ({"kv_memory": 1.5}, "kv_memory cannot be 1.5"),
        ({"kv_memory": True}, "kv_memory cannot be True"),
        ({"kv_memory": 0.5, "kv_cache_bytes": 1 << 20}, "the KV cache's size is given twice"),
        ({"kv_memory": 1e-12}, "one sequence of max_model_len=40 tokens needs"),
    ],
)
def test_load_options_are_checked(path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        load(path, **options)
    assert caught.value.fix


def test_the_cache_is_never_larger_than_it_needs_to_be() -> None:
    program = tiny_program(MODEL)
    assert block_count(program, None) == block_count(program, 1 << 40) == LIMITS.max_sequences * 5
    assert block_count(program, 2 * ONE_SEQUENCE + 511) == 10


@pytest.mark.parametrize(("available", "expected"), [(1000, 500), (10_000, 4000), (400, 400)])
def test_the_default_cache_is_a_share_of_the_memory_or_one_sequence(available: int, expected: int) -> None:
    assert default_bytes(available, one_sequence=500) == expected


def test_a_share_of_the_memory_sizes_the_cache(path: Path) -> None:
    assert share_bytes(1000, 0.25, None) == 250
    with load(path, kv_memory=0.01) as engine:
        assert engine.loop.pool.count == LIMITS.max_sequences * 5, "never more than it needs"


def test_opening_an_engine_imports_neither_torch_nor_transformers(path: Path) -> None:
    script = f"""
import sys
import llmc
from llmc.runtime.loop import step_loop
from llmc.runtime.executors import cpp
from llmc.engine_format import read_engine
from llmc.runtime.loading import load
read_engine(__import__("pathlib").Path({str(path)!r}))
llmc.SamplingParams(temperature=0.5)
loaded = sorted(m for m in ("torch", "transformers", "pydantic", "sympy") if m in sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=path.parent)


def test_the_package_offers_the_runtime() -> None:
    assert llmc.Engine is Engine and llmc.SamplingParams is SamplingParams and llmc.load is load


@pytest.mark.parametrize("given", [None, 3, b"engine"])
def test_a_path_of_a_wrong_type_is_refused(given: Any, engine: Engine) -> None:
    with pytest.raises(OptionError, match="path cannot be"):
        load(given)
    with pytest.raises(OptionError, match="path cannot be"):
        engine.save(given)
    with pytest.raises(OptionError, match="output cannot be"):
        llmc.build("model", given)


def test_arguments_of_wrong_types_are_refused(engine: Engine) -> None:
    wrong: Any = 3
    with pytest.raises(OptionError, match=r"passes cannot be 3 \(int\)"):
        llmc.compile("model", passes=wrong)
    with pytest.raises(RequestError, match=r"3 \(int\) is not a SamplingParams"):
        engine.generate([[5]], wrong)
    with pytest.raises(RequestError, match=r"3 \(int\) is not a SamplingParams"):
        engine.stream([5], wrong)
    with pytest.raises(RequestError, match=r"a text cannot be 3 \(int\)"):
        engine.tokenize(wrong)
    refused: list[Any] = [wrong, ["a"], [-1], [VOCAB]]
    for ids in refused:
        with pytest.raises(RequestError):
            engine.detokenize(ids)
    assert engine.detokenize([]) == ""
