"""Engines of ONNX files answer as onnxruntime does with the same file: logits and greedy text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import llmc
from tests.onnx_files import (
    Array,
    OnnxruntimeModel,
    genai_model,
    optimum_model,
    overrides,
    transformers_model,
)
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

_TOKENS = tiny_tokens(24)
# Of the logits' spread.
_CLOSE = 1e-4
_GENAI = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "gpt_oss")
_OPTIMUM = ("llama", "mistral", "qwen3", "gemma2", "gpt2", "phi3", "stablelm")


def distance(found: object, expected: Array) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / (expected.max() - expected.min()))


def assert_same(place: Path, file: Path, head_dim: int = 16) -> None:
    """64 greedy tokens, and the logits of a prompt longer than any window."""
    model = OnnxruntimeModel(file, head_dim)
    with llmc.compile(place, target="cpu") as engine:
        assert distance(engine.logits(_TOKENS), model.logits(_TOKENS)) <= _CLOSE
        found = engine.generate([_TOKENS], max_tokens=64, temperature=0.0, ignore_eos=True)[0]
        assert list(found.token_ids) == model.greedy(_TOKENS, 64)


@pytest.mark.parametrize("family", quick_sample(_GENAI, ("qwen3",)))
def test_a_model_of_onnxruntime_genai(family: str, tmp_path: Path) -> None:
    place = genai_model(family, tmp_path)
    assert_same(place, place / "model.onnx", overrides(family).get("head_dim", 16))


@pytest.mark.slow
@pytest.mark.parametrize("family", _OPTIMUM)
def test_a_model_of_plain_operators_with_a_cache(family: str, tmp_path: Path) -> None:
    """A file is named, in a directory of external data."""
    place = optimum_model(family, tmp_path)
    assert (place / "model.onnx.data").is_file()
    assert_same(place / "model.onnx", place / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_a_model_of_transformers_exporter(family: str, tmp_path: Path) -> None:
    place = transformers_model(family, tmp_path)
    assert_same(place, place / "model.onnx")


def test_an_engine_has_what_stands_beside_the_file(tmp_path: Path) -> None:
    """The tokenizer, and what genai_config.json says of tokens and lengths."""
    place = genai_model("llama", tmp_path)
    engine_path = tmp_path / "engine.llmc"
    with llmc.compile(place / "model.onnx", target="reference", output=engine_path) as engine:
        assert engine.detokenize(engine.tokenize("ab")) == "ab"
        assert engine.info.eos_token_ids == (1,)
        assert engine.info.max_positions == 320
        assert engine.info.family == "llama"
