"""Whole programs of recurrent models and hybrids, each kernel in Triton's interpreter, say what Hugging Face says."""

from __future__ import annotations

from pathlib import Path

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
from tests.end_to_end.logits import assert_close
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample
from tests.tiny_models import saved, tiny_tokens

FAMILIES = [
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h"),
    *("kimi_linear", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    *("minimax", "recurrent_gemma", "rwkv", "xlstm"),
]


@pytest.mark.parametrize("family", quick_sample(FAMILIES, {"mamba"}))
def test_recurrent_models_say_what_hugging_face_says(family: str, tmp_path: Path) -> None:
    """Two sequences: a prompt in two chunks, then single tokens, beside a whole prompt. In fp32."""
    options = BuildOptions(max_batch_tokens=64, max_logit_rows=64)
    model = tiny_architecture(family)
    captured = capture(saved(model, tmp_path / "model"), options)
    graph = run_pipeline(captured.graph, default(), options).graph
    lowered = lower_device(graph, gpu_target("h100"), options)
    tokens, others = tuple(tiny_tokens(21)), tuple(tiny_tokens(9))[::-1]
    steps = [
        (Chunk(1, 0, tokens[:13]),),
        (Chunk(0, 0, others[:8]), Chunk(1, 13, tokens[13:20])),
        (Chunk(1, 20, tokens[20:]), Chunk(0, 8, others[8:])),
    ]
    got = interpret_steps(lowered, captured.source, steps, tmp_path)
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step, logits in zip(steps, got, strict=True):
        for chunk, part in zip(step, logits, strict=True):
            parts[chunk.sequence].append(part)
    for sequence, prompt in ((0, others), (1, tokens)):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float().numpy()
        assert_close(torch.cat(parts[sequence]).numpy(), expected)
