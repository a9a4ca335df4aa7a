"""Every supported family comes out of the whole pipeline with the ops that are expected, and with HF's logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCaptures
from tests.passes.pass_checks import histogram
from tests.plain_modules import VOCAB, eager_decoder, sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, tiny_tokens
from tests.tolerances import PASSES

LAYERS = 2
# Of those of which no engine is compared with its model in make test (tests/end_to_end/test_families.py).
QUICK = ("llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "stablelm", "olmo2")
# Largest |Δlogit| over the logits' standard deviation in fp32.

_ENDS = {"llmc.embedding": 1, "llmc.lm_head": 1, "llmc.select_rows": 2}
_ROPE = {"llmc.rope_angles": 1, "llmc.rope_kv_write": LAYERS, "llmc.paged_attention": LAYERS}
_PRE_NORM = {"llmc.linear": LAYERS, "llmc.fused_linear": 2 * LAYERS}
_GATED = {"llmc.gated_linear": LAYERS}
_LLAMA = {**_ENDS, **_ROPE, **_PRE_NORM, **_GATED, "llmc.rms_norm": 2 * LAYERS + 1}
_MLP = {**_ENDS, **_ROPE, "llmc.linear": LAYERS, "llmc.fused_linear": 3 * LAYERS, "llmc.layer_norm": 2 * LAYERS + 1}
# Q, K and V, the output product and the last MLP product, each followed by a norm that add_rms_norm cannot take.
_POST_NORM = {**_ENDS, **_ROPE, **_GATED, "llmc.linear": 3 * LAYERS}
_PLAIN = {
    "llmc.embedding": 2,
    "llmc.lm_head": 1,
    "llmc.select_rows": 2,
    "llmc.add_layer_norm": 1,
    "llmc.layer_norm": 2 * LAYERS,
    "llmc.linear": LAYERS,
    "llmc.fused_linear": 3 * LAYERS,
    "llmc.kv_write": LAYERS,
    "llmc.paged_attention": LAYERS,
}

EXPECTED = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "llmc.rms_norm": 4 * LAYERS + 1},
    "gemma": {**_LLAMA, "aten.mul.Tensor": 1},
    "gemma2": {
        **_POST_NORM,
        "aten.mul.Tensor": 2,
        "aten.div.Tensor": 1,
        "aten.tanh": 1,
        "llmc.rms_norm": 2 * LAYERS + 1,
        "llmc.add_rms_norm": 2 * LAYERS,
    },
    "gemma3_text": {
        **_POST_NORM,
        "aten.mul.Tensor": 1,
        "llmc.rope_angles": 2,
        "llmc.rms_norm": 4 * LAYERS + 1,
        "llmc.add_rms_norm": 2 * LAYERS,
    },
    "phi3": _LLAMA,
    "gpt2": _PLAIN,
    "gpt_neox": _MLP,
    "olmo2": {
        **_POST_NORM,
        "aten.add.Tensor": 2 * LAYERS - 1,
        "llmc.rms_norm": 4 * LAYERS,
        "llmc.add_rms_norm": 1,
    },
    "starcoder2": _MLP,
    "granite": {**_LLAMA, "aten.mul.Tensor": 1, "aten.div.Tensor": 1},
    "cohere": {
        **_ENDS,
        **_ROPE,
        **_PRE_NORM,
        **_GATED,
        "llmc.layer_norm": LAYERS + 1,
        "llmc.select_rows": 3,
        "aten.mul.Tensor": 1,
    },
    "smollm3": {**_LLAMA, "llmc.rope_kv_write": 1, "llmc.kv_write": 1},
    "stablelm": {**_ENDS, **_ROPE, **_PRE_NORM, **_GATED, "llmc.layer_norm": 2 * LAYERS + 1},
}


def test_every_family_has_an_expectation() -> None:
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("family", quick_sample(FAMILIES, QUICK))
def test_a_family_is_optimized_and_computes_the_same(family: str, captured_family: FamilyCaptures) -> None:
    made = captured_family(family)
    _check(made.captured, EXPECTED[family], tiny_tokens(20), lambda ids: made.model(ids).logits)


@pytest.mark.parametrize("decoder", [sdpa_decoder, eager_decoder])
def test_a_plain_module_is_optimized_and_computes_the_same(decoder: Callable[[], nn.Module]) -> None:
    model = decoder()
    _check(capture(model, BuildOptions()), _PLAIN, tiny_tokens(20, VOCAB), lambda ids: model(ids)[0])


def _check(captured: Captured, expected: dict[str, int], tokens: list[int], logits: Callable[[Tensor], Tensor]) -> None:
    graph = run_pipeline(captured.graph, default(), BuildOptions()).graph
    assert graph.stage is Stage.OPTIMIZED
    assert histogram(graph) == dict(sorted(expected.items()))
    with torch.no_grad():
        wanted = logits(torch.tensor([tokens]))[0].float()
    for sizes in (None, [7, 1, 1, 11]):
        seen = run_tokens(graph, captured.source, tokens, chunk_sizes=sizes)
        assert float((seen - wanted).abs().max() / wanted.std()) <= PASSES
