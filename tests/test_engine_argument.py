"""An engine that is given where a model may be: options that it was not built with are refused, others agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc import SamplingParams, build, load
from llmc.cli.engine_options import EngineOptions
from llmc.engine_format.manifest import read_manifest
from llmc.engines.engine_argument import engine_of
from llmc.engines.llm import LLM
from llmc.errors import OptionError, TargetError
from tests.cli.command import MODEL, assert_user_error, llmc

STRIDE, OTHER = "stride:step=2,recent=16,rows=16", "stride:step=3,recent=16,rows=16"
PROMPT = "The king said that he"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": "cpu", "dtype": "bfloat16", "kv_dtype": "bfloat16", "max_model_len": 256, "block_size": 16},
        {"target": "auto", "dtype": "auto", "kv_cache": "auto", "quantize": (), "check_passes": False},
        {"max_batch_tokens": 512, "calibration": None},
    ],
)
def test_an_engine_that_is_as_wished_is_taken(draft_engine: Path, options: dict[str, Any]) -> None:
    assert read_manifest(draft_engine).model.dtype == "bfloat16"
    assert engine_of(draft_engine, **options) == draft_engine


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        ({"target": "h100"}, "built without target='h100': it is for cpu-", "--target h100"),
        (
            {"dtype": "float32"},
            "built without dtype='float32': it is for cpu-.* in bfloat16, not quant",
            "--dtype float32",
        ),
        ({"kv_dtype": "float32"}, "without kv_dtype='float32'", "--kv-dtype float32"),
        ({"quantize": "int4,lm_head=int8"}, "without quantize='int4,lm_head=int8'", "--quantize int4,lm_head=int8"),
        ({"max_model_len": 512}, "without max_model_len=512", "--max-model-len 512"),
        ({"strict": True}, "without strict=True", "--strict -o"),
        ({"enable_lora": True}, "built without enable_lora=True", "--enable-lora"),
        ({"enable_loras": True}, "unknown build option 'enable_loras'", "did you mean 'enable_lora'?"),
        ({"dtype": "float31"}, "build option 'dtype' cannot be 'float31'", "llmc build --help"),
    ],
)
def test_an_engine_that_is_not_as_wished_is_refused(
    draft_engine: Path, options: dict[str, Any], problem: str, fix: str
) -> None:
    for take in (engine_of, LLM):
        with pytest.raises(OptionError, match=problem) as caught:
            take(draft_engine, **options)
        assert caught.value.fix is not None and fix in caught.value.fix


def test_the_command_line_refuses_the_same(draft_engine: Path) -> None:
    assert EngineOptions().engine(draft_engine) == draft_engine
    assert EngineOptions(target="cpu").engine(draft_engine, max_sequences=3) == draft_engine
    for options in (EngineOptions(target="h100"), EngineOptions(dtype="float32"), EngineOptions(quantize=["int4"])):
        with pytest.raises(OptionError, match="the engine was built without"):
            options.engine(draft_engine)
    assert EngineOptions().engine(draft_engine, longest=256) == draft_engine
    with pytest.raises(OptionError, match=r"built without max_model_len=64: .* not quantized, up to 256 tokens"):
        EngineOptions().engine(draft_engine, longest=64)
    with pytest.raises(TargetError, match="unknown target 'h10'"):
        EngineOptions(target="h10").engine(draft_engine)


@pytest.fixture(scope="module")
def strided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose tables are cut for the first time at 48 tokens."""
    path = tmp_path_factory.mktemp("strided") / "engine.llmc"
    build(MODEL, path, target="reference", max_model_len=256, kv_compression=STRIDE)
    return path


def test_an_engine_with_a_policy_runs_others(strided: Path) -> None:
    """A load may choose another policy than the build did, also on the command line."""
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    with load(strided) as engine:
        texts = (STRIDE, OTHER, "none")
        said = {text: engine.generate(PROMPT, replace(params, kv_compression=text))[0].text for text in texts}
    assert len({*said.values()}) == 3
    for text, expected in said.items():
        assert EngineOptions(kv_compression=text).engine(strided) == strided
        with LLM(strided, kv_compression=text) as model:
            assert model.generate(PROMPT, params)[0].text == expected
        asked = ("--prompt", PROMPT, "--max-tokens", "120", "--ignore-eos", "--temperature", "0", "--json")
        outcome = llmc("run", strided, *asked, "--kv-compression", text)
        assert outcome.code == 0 and json.loads(outcome.out)["text"] == expected, outcome
    with LLM(strided) as model:
        assert model.generate(PROMPT, params)[0].text == said[STRIDE]
    with load(strided, output_cache_bytes=100_000) as engine:
        for model, text in ((LLM(engine), STRIDE), (LLM(engine, kv_compression="none"), "none")):
            assert model.generate(PROMPT, params)[0].text == said[text]
        with pytest.raises(OptionError, match="cannot run streaming"):
            LLM(engine, kv_compression="streaming:budget=64")


def test_an_engine_with_a_policy_refuses_what_it_cannot_run(strided: Path) -> None:
    policy = "streaming:budget=64"
    for arguments in (("run", strided, "--prompt", PROMPT), ("chat", strided), ("serve", strided)):
        assert_user_error(llmc(*arguments, "--kv-compression", policy), "cannot run streaming:budget=64")
    with pytest.raises(OptionError, match="cannot run streaming"):
        LLM(strided, kv_compression=policy)
