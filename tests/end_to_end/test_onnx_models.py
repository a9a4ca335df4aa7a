"""Engines of ONNX files answer as onnxruntime does with the same file: logits and greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import llmc
from llmc.engine_format.manifest import read_manifest
from llmc.errors import CaptureError
from llmc.frontends.onnx.source import OnnxSource
from tests.onnx_files import (
    Array,
    OnnxruntimeModel,
    dequantized,
    genai_model,
    optimum_model,
    overrides,
    transformers_model,
)
from tests.tiny_models import tiny_tokens

_TOKENS = tiny_tokens(24)
# Of the logits' spread.
_CLOSE = 1e-4
_GENAI = ("llama", "mistral", "qwen2", "gemma", "gemma2", "granite", "gpt_oss")
_OPTIMUM = ("llama", "mistral", "qwen3", "gemma2", "gpt2", "phi3", "stablelm")


def distance(found: object, expected: Array) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / (expected.max() - expected.min()))


def assert_same(place: Path, file: Path, head_dim: int = 16, engine_path: Path | None = None, **options: Any) -> None:
    """64 greedy tokens, and the logits of a prompt longer than any window."""
    model = OnnxruntimeModel(file, head_dim)
    with llmc.compile(place, target="cpu", output=engine_path, **options) as engine:
        assert distance(engine.logits(_TOKENS), model.logits(_TOKENS)) <= _CLOSE
        completion = engine.generate([_TOKENS], max_tokens=64, temperature=0.0, ignore_eos=True)[0]
        assert list(completion.token_ids) == model.greedy(_TOKENS, 64)


@pytest.mark.slow
@pytest.mark.parametrize("family", _GENAI)
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ("llama", "gemma"))
def test_codes_of_onnxruntime_genai_are_kept(family: str, tmp_path: Path) -> None:
    """The logits are those of the numbers that the codes stand for; the Gemma's table is its head."""
    place = genai_model(family, tmp_path, "int4")
    file = place / "model.onnx"
    with llmc.compile(place, target="cpu", output=tmp_path / "engine.llmc") as engine:
        model = OnnxruntimeModel(dequantized(file, tmp_path / "numbers"), overrides(family).get("head_dim", 16))
        assert distance(engine.logits(_TOKENS), model.logits(_TOKENS)) <= _CLOSE
    source = OnnxSource(file)
    stored = {
        initializer.name: numpy_helper.to_array(initializer) for initializer in onnx.load(str(file)).graph.initializer
    }
    coded = [name for name in source.names() if source.weight(name) is not None and name in stored]
    assert len(coded) >= 11
    for name in coded:
        packed = stored[name].reshape(source.shape(name)[0], -1)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, : source.shape(name)[1]]
        assert np.array_equal(source.load(f"{name}::codes").numpy(), codes.astype(np.int16) - 8)


@pytest.mark.slow
def test_longrope_as_far_as_its_first_frequencies_hold(tmp_path: Path) -> None:
    """onnxruntime-genai's graph branches on the number of tokens; within max_model_len it always goes one way."""
    rope = {
        "rope_type": "longrope",
        "type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "original_max_position_embeddings": 96,
    }
    place = genai_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    with pytest.raises(CaptureError, match="> 96 depends on the number of tokens"):
        llmc.compile(place, target="cpu")
    assert_same(place, place / "model.onnx", max_model_len=96)


@pytest.mark.slow
def test_a_named_file_and_what_stands_beside_it(tmp_path: Path) -> None:
    """onnxruntime-genai's graph, and its tokenizer; genai_config.json says of tokens and lengths."""
    place, built = genai_model("qwen3", tmp_path), tmp_path / "engine.llmc"
    assert_same(place / "model.onnx", place / "model.onnx", overrides("qwen3")["head_dim"], built)
    assert (built / "tokenizer" / "tokenizer.json").read_bytes() == (place / "tokenizer.json").read_bytes()
    info = read_manifest(built).model
    assert (tuple(info.eos_token_ids), info.max_positions, info.family) == ((1,), 320, "qwen3")
