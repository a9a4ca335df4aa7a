"""NaN and infinity in the logits are told apart, and the advice is one that the engine's dtype leaves open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.errors import ModelFailureError
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampler import Sampler, choose
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.tiny_engine import mild_model, write_tiny_engine


def failure(logits: list[float], params: SamplingParams, dtype: str) -> str:
    none = np.zeros(0, np.int64)
    sampler = Sampler(params, none, len(logits), none, dtype=dtype)
    (outcome,) = choose([sampler], np.array([logits], np.float32))
    assert isinstance(outcome, ModelFailureError)
    return str(outcome)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(min_tokens=1)])
def test_what_is_wrong_with_them(params: SamplingParams) -> None:
    nan, inf = float("nan"), float("inf")
    assert "NaN (not a number), the first at token id 2" in failure([0.0, 1.0, nan, inf], params, "float16")
    assert "overflow, to +inf at token id 1" in failure([0.0, inf, -inf, 2.0], params, "float16")
    assert "all of them are -inf" in failure([-inf, -inf], params, "float16")


def test_the_advice_fits_the_dtype() -> None:
    said = {dtype: failure([float("inf")], SamplingParams(), dtype) for dtype in ("float16", "bfloat16", "float32")}
    assert all(dtype in text for dtype, text in said.items())
    assert "65504" in said["float16"] and "dtype=bfloat16" in said["float16"]
    assert "65504" not in said["bfloat16"] and "dtype=float32" in said["bfloat16"]
    assert "dtype=" not in said["float32"], "nothing wider is left"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=0),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        SamplingParams(max_tokens=2, beam_width=2),
    ],
)
@pytest.mark.parametrize("value, part", [("nan", "NaN"), ("inf", r"\+inf")])
def test_an_engine_names_its_dtype(value: str, part: str, params: SamplingParams, tmp_path: Path) -> None:
    model = mild_model()
    if value == "nan":
        model.weights["embedding"][13] = float("nan")
    else:
        for name in "qkv":
            model.weights[name].zero_()
        model.weights["embedding"][13] = 0.0
        model.weights["embedding"][13, 0] = 3e38
        model.weights["head"] *= 1000
    with load(write_tiny_engine(tmp_path / "engine.llmc", model=model)) as engine:
        with pytest.raises(ModelFailureError, match=part) as caught:
            engine.generate([13, 13, 13], params)
        assert engine.info.dtype in caught.value.problem
