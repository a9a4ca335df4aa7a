"""Whole programs of mixtures, each kernel in Triton's interpreter, say what Hugging Face says: every form of router."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.graph.execute import Chunk
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.codegen.triton.device_harness import interpret_steps
from tests.end_to_end.logits import assert_close, torch_logits
from tests.gpu_target import gpu_target
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_model, tiny_tokens

# A softmax before the largest are taken, one after that with biases, and groups of experts with a bias that selects.
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "glm4_moe": {
        **FAMILIES["llama"],
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_say_what_hugging_face_says(family: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then a single token, in fp32."""
    options = BuildOptions(max_batch_tokens=64, max_logit_rows=64)
    captured = capture(tiny_checkpoint(family, tmp_path / "model", **MIXTURES[family]), options)
    graph = run_pipeline(captured.graph, default(), options).graph
    lowered = lower_device(graph, gpu_target("h100"), options)
    tokens = tiny_tokens(21)
    steps = tuple((Chunk(0, a, tuple(tokens[a:b])),) for a, b in pairwise((0, 17, 20, 21)))
    got = torch.cat([part for step in interpret_steps(lowered, captured.source, steps, tmp_path) for part in step])
    assert_close(got.numpy(), torch_logits(tiny_model(family, **MIXTURES[family]), tokens))
