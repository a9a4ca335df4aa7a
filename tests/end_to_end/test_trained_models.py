"""The shipped trained models: fp32 engines equal Hugging Face's logits and text, bf16 engines its quality."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc import SamplingParams
from llmc.debug.compare import compare, hf_logits, windows
from tests.end_to_end.logits import GENERATED, TOLERANCE, assert_greedy

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MODELS = ("bard-6m", "bard-draft")
WINDOW = 256
WINDOWS = 12


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    return EXAMPLES / "models" / str(request.param)


@pytest.fixture(scope="module")
def heldout() -> str:
    return (EXAMPLES / "data" / "heldout.txt").read_text(encoding="utf-8")


def test_fp32_engine_equals_hugging_face(model: Path, heldout: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with llmc.compile(model, dtype="float32", output=tmp_path / "engine.llmc") as engine:
        result = compare(engine.logits, hf_logits(model), windows(engine.tokenize(heldout), WINDOW, 4))
        assert result.relative_difference <= TOLERANCE
        assert result.top1_agreement == 1.0
        prompts = ["The king said to his", "Once upon a time"]
        oracle = AutoModelForCausalLM.from_pretrained(model, dtype="float32").train(False)
        completions = engine.generate(prompts, SamplingParams(max_tokens=GENERATED, ignore_eos=True))
        for prompt, completion in zip(prompts, completions, strict=True):
            assert_greedy(oracle, engine.tokenize(prompt), list(completion.token_ids))


def test_bf16_engine_has_hugging_faces_quality(model: Path, heldout: str, tmp_path: Path) -> None:
    with llmc.compile(model, output=tmp_path / "engine.llmc") as engine:
        assert engine.info.dtype == "bfloat16"
        pieces = windows(engine.tokenize(heldout), WINDOW, WINDOWS)
        result = compare(engine.logits, hf_logits(model, "bfloat16"), pieces)
        assert result.perplexity <= 1.005 * result.reference_perplexity
        assert result.top1_agreement >= 0.97
