"""Engines with every KV block size, and engines compiled by clang++ for every instruction set that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import llmc
from llmc.options import BuildOptions
from llmc.targets import CPU_TARGETS, CpuTarget, missing_features
from tests.end_to_end.logits import assert_close, random_tokens, torch_logits
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_model

BLOCK_SIZES: tuple[int, ...] = get_args(BuildOptions.model_fields["block_size"].annotation)
LENGTHS = (3, 50, 129)
ROPE_SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 80},
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_logits_at_every_block_size(family: str, tmp_path: Path) -> None:
    checkpoint, model = tiny_checkpoint(family, tmp_path / "model"), tiny_model(family)
    prompts = [random_tokens(160, length) for length in LENGTHS]
    wanted = [torch_logits(model, tokens) for tokens in prompts]
    for size in BLOCK_SIZES:
        with llmc.compile(checkpoint, dtype="float32", block_size=size, max_batch_tokens=64) as engine:
            assert engine.limits.block_size == size
            for ours, theirs in zip(engine.logits(prompts), wanted, strict=True):
                assert_close(ours, theirs)


@pytest.mark.parametrize(
    "scaling", quick_sample(ROPE_SCALINGS, ROPE_SCALINGS[-1:]), ids=lambda scaling: str(scaling["rope_type"])
)
def test_scaled_rope(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Positions within the original context, and beyond it."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "model", rope_parameters=scaling)
    model = tiny_model("llama", rope_parameters=scaling)
    longest = random_tokens(160, LENGTHS[-1])
    assert not np.allclose(torch_logits(model, longest), torch_logits(tiny_model("llama"), longest))
    with llmc.compile(checkpoint, dtype="float32", max_batch_tokens=64) as engine:
        for length in LENGTHS:
            tokens = random_tokens(160, length)
            assert_close(engine.logits(tokens), torch_logits(model, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("target", CPU_TARGETS, ids=lambda target: target.name)
def test_clang_compiles_every_target(target: CpuTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    if missing_features(target):
        pytest.skip(f"this machine lacks {', '.join(missing_features(target))}")
    if not _knows(target):
        pytest.skip(f"this clang++ does not know {' '.join(target.compiler_flags)}")
    monkeypatch.setenv("CXX", "clang++")
    checkpoint, model = tiny_checkpoint("gemma2", tmp_path / "model"), tiny_model("gemma2")
    prompts = [random_tokens(160, length) for length in LENGTHS]
    with llmc.compile(checkpoint, target=target.name, dtype="float32", max_batch_tokens=64) as engine:
        for tokens, ours in zip(prompts, engine.logits(prompts), strict=True):
            assert_close(ours, torch_logits(model, tokens))


def _knows(target: CpuTarget) -> bool:
    """Whether clang++ takes the target's flags."""
    command = ["clang++", *target.compiler_flags, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return subprocess.run(command, capture_output=True).returncode == 0
