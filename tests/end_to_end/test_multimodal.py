"""The text half of multimodal checkpoints: logits as Hugging Face's whole model gives them for text alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.errors import BuildWarning, CaptureError
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers.capture import read_directory
from llmc.options import BuildOptions
from tests.end_to_end.logits import assert_close, random_tokens, torch_logits
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# model_type: the text half's, and what the whole config is made with.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"vision_config": {"model_type": "siglip_vision_model", **_VISION}, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "llama",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16},
            "image_token_index": 159,
        },
    ),
    "mistral3": (
        "mistral",
        {"vision_config": {"model_type": "pixtral", **_VISION}, "image_token_index": 159, "spatial_merge_size": 1},
    ),
}


def tiny_multimodal(family: str, directory: Path) -> Any:
    """A whole model in fp32 with seeded weights, saved."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText
    text, settings = WHOLE[family]
    text_settings = {"model_type": text, **FAMILIES[text]}
    config = AutoConfig.for_model(family, text_config=text_settings, **settings)
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", quick_sample(WHOLE, ("gemma3",)))
def test_the_text_half(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family, tmp_path / "model")
    with pytest.warns(BuildWarning, match=f"^{family} is multimodal: its text half is built, images are left out$"):
        engine = llmc.compile(str(tmp_path / "model"), target="reference", max_model_len=64)
    with engine:
        assert engine.info.family == WHOLE[family][0]
        tokens = random_tokens(150, 20)
        assert_close(engine.logits(tokens), torch_logits(model, tokens))


@pytest.mark.parametrize("family", quick_sample(WHOLE, ()))
def test_the_text_half_of_a_model_in_memory(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(BuildWarning, match=f"^{family} is multimodal: its text half is built, images are left out$"):
        engine = llmc.compile(model, target="reference", max_model_len=64)
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", BuildWarning)
        with llmc.compile(str(tmp_path / "model"), target="reference", max_model_len=64) as stored:
            tokens = random_tokens(150, 20)
            assert np.array_equal(engine.logits(tokens), stored.logits(tokens))
            assert engine.info.eos_token_ids == stored.info.eos_token_ids
            assert engine.manifest.cost == stored.manifest.cost  # No weight appears twice.
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_text_half_that_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLConfig

    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match="is multimodal, and its text half, 'qwen2_5_vl_text', has no causal"):
        read_directory(open_model(tmp_path), BuildOptions())


def test_a_text_half_that_sees_a_whole_prompt_at_once_is_refused(tmp_path: Path) -> None:
    from transformers import PaliGemmaConfig

    PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match="the text half of 'paligemma' attends to a whole prompt at once") as caught:
        read_directory(open_model(tmp_path), BuildOptions())
    assert caught.value.at == str(tmp_path / "config.json") and caught.value.fix
