"""Each of transformers' weight converters, of all models that it has: recipes make of a saved directory, to the bit,
what transformers loads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

import llmc
from llmc.errors import BuildWarning, CaptureError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.transformers.names import stored_recipes
from llmc.graph.weights import evaluate
from tests.frontends.converted_models import converted_model, converters_without
from tests.tiny_models import tiny_tokens
from tests.tolerances import ENGINES

_build: Any = conversion_mapping._build_checkpoint_conversion_mapping
CONVERTED = sorted(
    key
    for key, transforms in _build().items()
    if any(isinstance(transform, WeightConverter) for transform in transforms)
)
# Converters that nothing of what transformers saves is for: scales of FP8 experts, and experts as NeMo exports them.
_OF_OTHERS = {
    **{key: [[r"mlp\.experts\.w13_weight_scale"]] for key in ("inkling2", "inkling2_text")},
    "nemo_speechlm": [[r"\.mixer\.experts\.gate_and_up_projs"], [r"\.mixer\.experts\.down_projs"]],
}
# Multimodal ones whose text half is a causal model of transformers under names that the whole knows.
HALVES = ("kimi_k25", "minimax_m3_vl", "nemo_speechlm", "qianfan_ocr")
NO_CAUSAL_HALF = (
    *("UnlimitedOcrVisionEncoder", "deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "mistral_large4"),
    *("qwen3_omni_moe", "qwen3_vl_moe", "step3p7"),
)


@pytest.mark.slow
@pytest.mark.parametrize("key", CONVERTED)
def test_recipes_make_what_transformers_loads(key: str, tmp_path: Path) -> None:
    if key == "inkling_mm_model":
        pytest.importorskip("scipy", reason="its image tower is laid out by scipy")
    model = converted_model(key)
    model.save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    source = SafetensorsSource(tmp_path)
    with torch.device("meta"):
        empty = type(model)._from_config(model.config, dtype=torch.float32)
    stored = stored_recipes(empty, source)
    assert stored.recipes.keys() == expected.keys() and stored.notes == ()
    for name, tensor in expected.items():
        assert torch.equal(evaluate(stored.recipes[name], source), tensor), name
    assert converters_without(model, source.names()) == _OF_OTHERS.get(key, [])


@pytest.mark.slow
def test_experts_as_nemo_exports_them(tmp_path: Path) -> None:
    model = converted_model("nemo_speechlm")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for ours, theirs in (("up_proj", "gate_and_up_projs"), ("down_proj", "down_projs")):
        parts = [tensors.pop(f"llm.model.layers.1.mixer.experts.{index}.{ours}.weight") for index in range(4)]
        tensors[f"llm.model.layers.1.mixer.experts.{theirs}"] = torch.stack(parts).transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    source = SafetensorsSource(tmp_path)
    recipes = stored_recipes(model, source).recipes
    for name, tensor in model.state_dict().items():
        assert torch.equal(evaluate(recipes[name], source), tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("key", HALVES)
def test_text_halves_under_names_of_the_whole(key: str, tmp_path: Path) -> None:
    model, tokens = converted_model(key), tiny_tokens(33)
    model.save_pretrained(tmp_path)
    with pytest.warns(BuildWarning, match="its text half is built"):
        engine = llmc.compile(str(tmp_path), target="reference", dtype="float32", max_model_len=64)
    with engine, torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
        assert np.abs(engine.logits(tokens) - expected).max() <= ENGINES * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("key", NO_CAUSAL_HALF)
def test_text_halves_without_a_causal_model_are_refused(key: str, tmp_path: Path) -> None:
    converted_model(key).config.save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match=r"is multimodal, and its text half, .* has no causal language model"):
        llmc.build(tmp_path, tmp_path / "engine.llmc", target="reference")
