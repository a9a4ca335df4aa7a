"""The shipped trained models: fp32 engines equal Hugging Face's logits and text, bf16 engines its quality."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc import SamplingParams
from llmc.debug.compare import compare, windows
from llmc.debug.hf_oracle import hf_logits
from tests.end_to_end.logits import GENERATED, assert_close, assert_greedy
from tests.quick_sample import quick_sample
from tests.tolerances import ENGINES

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# The larger llama differs from the smaller one in sizes alone.
MODELS = quick_sample(("bard-6m", "bard-draft", "bard-mixture", "bard-hybrid"), ("bard-draft",))
WINDOW = 256
WINDOWS = 12


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    return EXAMPLES / "models" / str(request.param)


@pytest.fixture(scope="module")
def heldout() -> str:
    return (EXAMPLES / "data" / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine_directory(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's fp32 engine."""
    directory = tmp_path_factory.mktemp("trained") / "engine.llmc"
    llmc.build(model, directory, dtype="float32")
    return directory


def test_fp32_engine_equals_hugging_face(model: Path, heldout: str, engine_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    with llmc.load(engine_directory) as engine:
        result = compare(engine.logits, hf_logits(model), windows(engine.tokenize(heldout), WINDOW, 4))
        assert result.relative_difference <= ENGINES
        assert result.top1_agreement == 1.0
        prompts = ["The king said to his", "Once upon a time"]
        oracle = AutoModelForCausalLM.from_pretrained(model, dtype="float32").train(False)
        completions = engine.generate(prompts, SamplingParams(max_tokens=GENERATED, ignore_eos=True))
        for prompt, completion in zip(prompts, completions, strict=True):
            assert_greedy(oracle, engine.tokenize(prompt), list(completion.token_ids))


@pytest.mark.parametrize("step", [None, 5, 1], ids=["whole", "chunks of 5", "token by token"])
def test_logits_however_prompts_are_cut(model: Path, heldout: str, engine_directory: Path, step: int | None) -> None:
    """Prompts of several lengths that share their steps."""
    logits = hf_logits(model)
    with llmc.load(engine_directory, max_step_tokens=step) as engine:
        tokens = engine.tokenize(heldout)
        prompts = [tokens[start : start + length] for start, length in ((0, 1), (10, 7), (100, 33), (300, 100))]
        for prompt, ours in zip(prompts, engine.logits(prompts), strict=True):
            assert_close(ours, logits(prompt))


@pytest.mark.parametrize("name", MODELS)
def test_bf16_engine_has_hugging_faces_quality(name: str, heldout: str, tmp_path: Path) -> None:
    model = EXAMPLES / "models" / name
    with llmc.compile(model, output=tmp_path / "engine.llmc") as engine:
        assert engine.info.dtype == "bfloat16"
        pieces = windows(engine.tokenize(heldout), WINDOW, WINDOWS)
        result = compare(engine.logits, hf_logits(model, "bfloat16"), pieces)
        assert result.perplexity <= 1.005 * result.reference_perplexity
        assert result.top1_agreement >= 0.97
