"""Every architecture as transformers saves it, which is as it is on the hub: an expert each, projections apart, under
older names. Its converters are run without data, and nothing is loaded."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from tests.end_to_end.models_page import listed
from tests.tolerances import ENGINES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in listed("Compile and match") if "+" not in name])
def test_a_saved_directory_has_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    model = tiny_architecture(name)
    model.save_pretrained(tmp_path / "model")
    tokens = random.Random(name).choices(range(3, 150), k=33)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llmc.errors.BuildWarning)
        llmc.build(tmp_path / "model", tmp_path / "engine.llmc", target="reference", dtype="float32", max_model_len=64)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    with llmc.load(tmp_path / "engine.llmc") as engine:
        assert np.abs(engine.logits(tokens) - expected).max() <= ENGINES * expected.std()
