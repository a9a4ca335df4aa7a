"""Whole programs of models whose attention is of another kind, each kernel in Triton's interpreter, say what Hugging
Face says: latents of keys and values, ALiBi's slopes, chunks, windows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.architectures.tiny_config import tiny_architecture
from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.graph.execute import Chunk
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.codegen.triton.device_harness import interpret_steps
from tests.end_to_end.logits import Logits, assert_close
from tests.end_to_end.plain_codes import rounded_logits
from tests.end_to_end.test_newest_rows import SIMULATED, difference
from tests.gpu_target import gpu_target
from tests.tiny_models import saved, tiny_model, tiny_tokens

FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "bloom", "mpt", "falcon+alibi", "llama4_text", "gemma3_text")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_attentions_say_what_hugging_face_says(family: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then a single token, in fp32."""
    model, tokens = tiny_architecture(family), tiny_tokens(21)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    assert_close(_interpreted(model, tokens, tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["int8/int4:head:rotated:recent=5", "int4:g8:recent=16"])
def test_newest_rows_are_exact_beside_simulated_codes(kv_cache: str, tmp_path: Path) -> None:
    """Keys are turned once and written to both caches. Codes for all rows are farther away."""
    model, tokens = tiny_model("llama"), tiny_tokens(21)
    got = _interpreted(model, tokens, tmp_path, kv_cache=kv_cache)
    assert difference(got, rounded_logits(model, tokens, kv_cache)) < SIMULATED
    assert difference(got, rounded_logits(model, tokens, kv_cache.rpartition(":recent=")[0])) > SIMULATED


def _interpreted(model: Any, tokens: list[int], directory: Path, **given: Any) -> Logits:
    """The logits of a prompt in two chunks and a single token."""
    options = BuildOptions(max_batch_tokens=64, max_logit_rows=64, **given)
    captured = capture(saved(model, directory / "model"), options)
    lowered = lower_device(run_pipeline(captured.graph, default(), options).graph, gpu_target("h100"), options)
    steps = tuple((Chunk(0, a, tuple(tokens[a:b])),) for a, b in pairwise((0, 17, 20, 21)))
    got = torch.cat([part for step in interpret_steps(lowered, captured.source, steps, directory) for part in step])
    logits: Logits = got.numpy()
    return logits
