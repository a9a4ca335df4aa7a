"""Engines in pipeline stages on GPUs, compared with one stage: on one GPU or on several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.compiler import build
from llmc.settings import settings

MODEL = Path(__file__).parent.parent.parent.parent / "examples/models/bard-draft"
PROMPTS = [[5, 9, 11], [17] * 40, [3], [400, 2, 8, 8, 9]]
LIMITS: Any = {"dtype": "float32", "max_model_len": 128, "max_batch_tokens": 64, "max_sequences": 8}
# Chosen by the last stage in each of its ways, and by the first rank from logits.
SAMPLING = [
    llmc.SamplingParams(max_tokens=24, ignore_eos=True),
    llmc.SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
    llmc.SamplingParams(max_tokens=24, temperature=1.5, top_p=0.99, seed=4, ignore_eos=True),
    llmc.SamplingParams(max_tokens=24, ignore_eos=True, min_tokens=1),
]


@pytest.fixture(autouse=True)
def _settings_are_read_again() -> Iterator[None]:
    yield
    settings.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_have_the_tokens_of_one(tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer GPUs than ranks, stages share them; the ranks of a stage do not."""
    count = torch.cuda.device_count()
    if count < tensor:
        pytest.skip(f"{tensor} ranks of a stage need as many GPUs, and this machine has {count}")
    sizes: Any = {"tensor_parallel_size": tensor, "pipeline_parallel_size": 2}
    alone = build(MODEL, tmp_path / "one.llmc", target="auto", **LIMITS).path
    staged = build(MODEL, tmp_path / "stages.llmc", target="auto", **sizes, **LIMITS).path
    found = []
    # It does not apply to the engine of one rank.
    monkeypatch.setenv("LLMC_RANK_DEVICES", ",".join(str(rank % count) for rank in range(2 * tensor)))
    settings.cache_clear()
    for path in (alone, staged):
        with llmc.load(path) as engine:
            tokens = [[done.token_ids for done in engine.generate(PROMPTS, params)] for params in SAMPLING]
            found.append((tokens, engine.logits(PROMPTS[1])))
    (expected, logits), (actual, ours) = found
    np.testing.assert_allclose(ours, logits, rtol=0, atol=2e-2)
    # Ranks add in another order; stages alone change no bit.
    assert tensor > 1 or actual == expected


@pytest.mark.gpu
def test_a_stage_more_than_gpus_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMC_RANK_DEVICES", raising=False)
    settings.cache_clear()
    path = build(MODEL, tmp_path / "stages.llmc", target="auto", pipeline_parallel_size=2, **LIMITS).path
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each stage")
    with pytest.raises(llmc.errors.TargetError, match="2 GPUs: 2 stages of 1 rank, and this process sees 1"):
        llmc.load(path, executor="cuda")
