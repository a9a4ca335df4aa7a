"""Whole programs of models that read whole texts, each kernel interpreted, give the rows that transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.graph.execute import Chunk
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.codegen.triton.device_harness import interpret_steps
from tests.end_to_end.logits import assert_close
from tests.gpu_target import gpu_target
from tests.heads.tiny_texts import MODELS, rows_of, texts, tiny_model
from tests.tiny_models import saved


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Three texts in one step, whose last tokens' rows are theirs. In fp32."""
    options = BuildOptions(max_batch_tokens=64, max_logit_rows=64)
    model, read = tiny_model(name), texts((1, 7, 33))
    captured = capture(saved(model, tmp_path / "model"), options)
    lowered = lower_device(run_pipeline(captured.graph, default(), options).graph, gpu_target("h100"), options)
    step = tuple(Chunk(sequence, 0, tuple(tokens)) for sequence, tokens in enumerate(read))
    (actual,) = interpret_steps(lowered, captured.source, (step,), tmp_path)
    assert_close(torch.stack([rows[-1] for rows in actual]).numpy(), rows_of(model, read))
