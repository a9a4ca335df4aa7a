"""An engine that is given where a model may be: options that it was not built with are refused, others agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llmc import build
from llmc.cli.engine_options import EngineOptions
from llmc.engine_format.manifest import read_manifest
from llmc.engines.engine_argument import engine_of
from llmc.engines.llm import LLM
from llmc.errors import OptionError, TargetError
from tests.cli.command import MODEL


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


def test_an_engine_with_a_policy_is_taken_without_naming_it(tmp_path: Path) -> None:
    """And one that is older than the option has its default."""
    policy = "stride:step=2,recent=64"
    path = tmp_path / "strided.llmc"
    build(MODEL, path, target="reference", max_model_len=256, kv_compression=policy)
    assert EngineOptions().engine(path) == EngineOptions(kv_compression=policy).engine(path) == path
    with pytest.raises(OptionError, match="without kv_compression='none'"):
        EngineOptions(kv_compression="none").engine(path)
    manifest = read_manifest(path)
    older = replace(manifest, options={k: v for k, v in manifest.options.items() if k != "kv_compression"})
    with patch("llmc.engines.engine_argument.read_manifest", return_value=older):
        assert EngineOptions(kv_compression="none").engine(path) == path
