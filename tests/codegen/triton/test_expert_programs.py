"""Whole programs of mixtures, each kernel in Triton's interpreter, have the logits of Hugging Face for every form of
router, and those of the graph where tokens are rounded to codes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import Chunk
from llmc.options import BuildOptions
from llmc.passes.pipeline import canonical, default
from llmc.passes.runner import run_pipeline
from tests.codegen.triton.device_harness import interpret_steps
from tests.codegen.triton.test_quantized_programs import difference
from tests.end_to_end.logits import assert_close, torch_logits
from tests.gpu_target import gpu_target
from tests.passes.quantization.quantizing import optimized
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


@functools.cache
def _captured() -> Captured:
    """A tiny Mixtral at the canonical stage, and its weights. Tokens have 2 groups of channels, and 3 before the down
    projections."""
    options, model = BuildOptions(), tiny_model("mixtral", intermediate_size=96)
    found = capture(model, options)
    return Captured(run_pipeline(found.graph, canonical(), options).graph, found.source)


_ROUNDED = ("w8a8:x32", "w8a8:xrow", "w4a8:g32:xrow", "w6a8:g32:x32", "q4_k:x32", "fp8-w8a8")


@pytest.mark.parametrize("scheme", ["w4a8:g32:x32", *(pytest.param(each, marks=pytest.mark.slow) for each in _ROUNDED)])
def test_experts_of_rounded_tokens_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    """But where a sum in another order moves an activation over the edge between two codes."""
    graph = optimized(f"*experts*={scheme}", captured=_captured()).graph
    assert len([node for node in graph.graph.nodes if node.target is torch.ops.llmc.round_tokens.default]) == 4
    assert difference(graph, tmp_path, _captured()) < 4e-2
