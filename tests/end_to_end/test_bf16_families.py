"""bf16 engines of every family against the torch models in bf16 and fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from tests.end_to_end.logits import Logits, random_tokens, torch_logits
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_model
from tests.tolerances import BF16_ENGINES

# The largest root mean square of Δlogit over the spread of the logits. A bf16 number has 8 bits: one rounding is
# 2⁻⁹ of a value, and two layers with a dozen roundings each amplify it. Seen: 0.007 to 0.025.
# Against fp32 the engine may be off by this times what torch's own bf16 is off by. Seen: 0.65 to 0.9.
FACTOR = 1.1
# Of rows; random weights make near ties. Seen: 0.946 to 1.
AGREEMENT = 0.93
QUICK = ("llama",)


@pytest.mark.parametrize("family", quick_sample(FAMILIES, QUICK))
def test_as_near_to_fp32_as_torch_in_bf16(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model", torch.bfloat16)
    rounded = tiny_model(family).to(torch.bfloat16)
    exact = tiny_model(family)
    # The same weights, rounded once, in fp32 arithmetic.
    exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    prompts = [random_tokens(160, length) for length in (100, 41, 7)]
    with llmc.compile(checkpoint, output=tmp_path / "engine.llmc", max_model_len=128) as engine:
        assert engine.info.dtype == "bfloat16"
        ours = np.concatenate(engine.logits(prompts))
    torch_bf16, torch_fp32 = (np.concatenate([torch_logits(m, p) for p in prompts]) for m in (rounded, exact))
    error, theirs = deviation(ours, torch_fp32), deviation(torch_bf16, torch_fp32)
    assert error <= FACTOR * theirs, f"{error:.4f} of the spread off fp32, torch in bf16 {theirs:.4f}"
    assert deviation(ours, torch_bf16) <= BF16_ENGINES
    assert agreement(ours, torch_bf16) >= AGREEMENT
    assert agreement(ours, torch_fp32) >= AGREEMENT


def deviation(ours: Logits, theirs: Logits) -> float:
    """The root mean square difference over the spread."""
    return float(np.sqrt(np.square(ours - theirs).mean()) / theirs.std())


def agreement(ours: Logits, theirs: Logits) -> float:
    """The share of rows with the same largest logit."""
    return float((ours.argmax(-1) == theirs.argmax(-1)).mean())
