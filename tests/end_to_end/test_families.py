"""Compiled fp32 engines against Hugging Face in fp32: logits however the prompt is cut, and greedy text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

import llmc
from llmc import Engine, SamplingParams
from llmc.runtime.engine import load
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_model

# Largest |Δlogit| over the logits' standard deviation: what re-ordered fp32 sums may cost.
TOLERANCE = 1e-3
GENERATED = 256
LENGTHS = (1, 7, 33, 100)


@dataclass(frozen=True)
class Case:
    family: str
    model: PreTrainedModel
    path: Path


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny random model of the family and its fp32 engine."""
    family: str = request.param
    directory = tmp_path_factory.mktemp(family)
    checkpoint = tiny_checkpoint(family, directory / "model")
    path = directory / "engine.llmc"
    llmc.build(checkpoint, path, target="cpu", dtype="float32", max_batch_tokens=64, max_logit_rows=32)
    yield Case(family, tiny_model(family).eval(), path)


def tokens_of(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def hf_logits(model: PreTrainedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        result: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return result


def assert_close(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    assert ours.shape == theirs.shape
    difference = float(np.abs(ours - theirs).max() / theirs.std())
    assert difference <= TOLERANCE, f"max |Δlogit| is {difference:.2e} of the spread"


@pytest.mark.parametrize("chunk", [64, 5, 1], ids=["whole", "chunks of 5", "token by token"])
def test_logits_are_hugging_faces(case: Case, chunk: int) -> None:
    with load(case.path, max_batch_tokens=chunk) as engine:
        for length in LENGTHS:
            tokens = tokens_of(engine.info.vocab_size, length, seed=length)
            assert_close(engine.logits(tokens), hf_logits(case.model, tokens))


def test_mixed_batches_of_prefill_and_decode_give_the_same_logits(case: Case) -> None:
    with load(case.path, max_batch_tokens=16) as engine:
        prompts = [tokens_of(engine.info.vocab_size, length, seed=length) for length in (3, 50, 1, 21)]
        for tokens, ours in zip(prompts, engine.logits(prompts), strict=True):
            assert_close(ours, hf_logits(case.model, tokens))


def test_greedy_text_is_hugging_faces(case: Case) -> None:
    with load(case.path) as engine:
        prompts = [tokens_of(engine.info.vocab_size, length, seed=length) for length in (9, 2)]
        params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
        completions = engine.generate(prompts, params)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert_greedy(case.model, engine, prompt, list(completion.token_ids))


def assert_greedy(model: PreTrainedModel, engine: Engine, prompt: list[int], generated: list[int]) -> None:
    """Each generated token is Hugging Face's argmax after the tokens before it: one teacher-forced pass shows it."""
    assert len(generated) == GENERATED
    logits = hf_logits(model, prompt + generated)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == generated
