"""Every supported family in bf16, where casts surround each norm and rotation, becomes the same few ops as in fp32."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from llmc.frontends.capture import capture
from llmc.graph.execute import run_tokens
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.pipeline import canonical
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.plain_modules import eager_decoder, sdpa_decoder
from tests.tiny_models import FAMILIES, tiny_model, tiny_tokens

LAYERS = 2

_COMMON = {"llmc.embedding": 1, "llmc.lm_head": 1, "llmc.attention": LAYERS, "aten.add.Tensor": 2 * LAYERS}
_ROPE = {"llmc.rope_angles": 1, "llmc.rope": 2 * LAYERS}
_GATED = {"llmc.gated_activation": LAYERS, "llmc.linear": 7 * LAYERS}
_LLAMA = {**_COMMON, **_ROPE, **_GATED, "llmc.rms_norm": 2 * LAYERS + 1}
_MLP = {**_COMMON, "aten.gelu": LAYERS, "llmc.layer_norm": 2 * LAYERS + 1}
_PLAIN = {**_MLP, "llmc.embedding": 2, "llmc.linear": 4 * LAYERS, "aten.add.Tensor": 2 * LAYERS + 1}

EXPECTED = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "llmc.rms_norm": 4 * LAYERS + 1},
    "gemma": {**_LLAMA, "aten.mul.Tensor": 1},
    "gemma2": {
        **_LLAMA,
        "llmc.rms_norm": 4 * LAYERS + 1,
        "aten.mul.Tensor": 2,
        "aten.div.Tensor": 1,
        "aten.tanh": 1,
    },
    "gemma3_text": {**_LLAMA, "llmc.rms_norm": 6 * LAYERS + 1, "llmc.rope_angles": 2, "aten.mul.Tensor": 1},
    "phi3": {**_LLAMA, "llmc.linear": 4 * LAYERS},
    "gpt2": _PLAIN,
    "gpt_neox": {**_MLP, **_ROPE, "llmc.linear": 4 * LAYERS},
    "olmo2": {**_LLAMA, "llmc.rms_norm": 4 * LAYERS + 1},
    "starcoder2": {**_MLP, **_ROPE, "llmc.linear": 6 * LAYERS},
    "granite": {**_LLAMA, "aten.mul.Tensor": 1 + 2 * LAYERS, "aten.div.Tensor": 1},
    "cohere": {**_COMMON, **_ROPE, **_GATED, "llmc.layer_norm": LAYERS + 1, "aten.mul.Tensor": 1},
    "smollm3": {**_LLAMA, "llmc.rope": LAYERS},
    "stablelm": {**_COMMON, **_ROPE, **_GATED, "llmc.layer_norm": 2 * LAYERS + 1},
}
_VIEWS = {"getitem", "aten.reshape", "aten.slice.Tensor"}


def _ops(result: PipelineResult) -> dict[str, int]:
    assert result.graph.stage is Stage.CANONICAL
    names = Counter(op_name(n.target) for n in result.graph.graph.nodes if n.op == "call_function")
    return {name: count for name, count in names.items() if name not in _VIEWS}


def test_every_family_has_an_expectation() -> None:
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_bf16(family: str) -> None:
    model = tiny_model(family)
    tokens = tiny_tokens(20)
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0]
        model = model.to(torch.bfloat16)
        theirs = model(torch.tensor([tokens])).logits[0].float()
    captured = capture(model, BuildOptions())
    result = run_pipeline(captured.graph, canonical(), BuildOptions())
    assert _ops(result) == EXPECTED[family]
    ours = run_tokens(result.graph, captured.source, tokens)
    # Ours rounds in fewer places: it may differ from fp32 by about as much as HF's bf16 does, not by more.
    assert float((ours - exact).square().mean()) <= 1.5 * float((theirs - exact).square().mean())
    again = run_pipeline(result.graph, canonical()[:-1], BuildOptions())
    assert [r.name for r in again.records if r.rewrites] == []


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_plain_module(name: str) -> None:
    model = sdpa_decoder() if name == "sdpa" else eager_decoder()
    result = run_pipeline(capture(model, BuildOptions()).graph, canonical(), BuildOptions())
    assert _ops(result) == _PLAIN
