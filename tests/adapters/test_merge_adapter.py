"""Adapters merged into weights: the model that PEFT makes of them, whatever the family and the options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmc.errors import AdapterError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.options import parse_options
from tests.adapters.directories import llama_adapter, peft_adapter, written_adapter
from tests.frontends.graph_execution import run_captured
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_model, tiny_tokens

LAYERS = ["q_proj", "v_proj", "down_proj"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": LAYERS, "r": 4, "lora_alpha": 6}),
    ("llama", {"target_modules": "all-linear", "r": 4, "use_rslora": True}),
    ("llama", {"target_modules": r".*\.1\.self_attn\.(k|o)_proj", "r": 3}),
    (
        "llama",
        {
            "target_modules": LAYERS,
            "r": 4,
            "rank_pattern": {"layers.1.self_attn.q_proj": 7, ".*down_proj": 2},
            "alpha_pattern": {"v_proj": 1, "layers.[01].mlp.down_proj": 9},
        },
    ),
    ("llama", {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["lm_head"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"], "r": 2}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 4}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"], "r": 4}),
    ("phi3", {"target_modules": "all-linear", "r": 4}),
    ("gemma2", {"target_modules": "all-linear", "r": 4}),
    ("cohere", {"target_modules": ["lm_head", "q_proj"], "r": 4}),  # tied
    ("cohere", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
]


def _captured(model: Path, directory: Path) -> Captured:
    return capture(model, parse_options({"lora": {"style": directory}}))


@pytest.mark.parametrize(("family", "config"), quick_sample(CASES, (CASES[1], CASES[3], CASES[6], CASES[10])))
def test_equals_pefts_model(
    family: str, config: dict[str, Any], checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(family)
    adapted = peft_adapter(copy.deepcopy(model), tmp_path, **config)
    tokens = tiny_tokens(9)
    with torch.no_grad():
        expected = adapted(torch.tensor([tokens])).logits[0]
        base = model(torch.tensor([tokens])).logits[0]
    spread = float(expected.std())
    actual = run_captured(_captured(checkpoint_of(family), tmp_path), tokens)
    assert float((actual - expected).abs().max()) < 1e-4 * spread
    assert float((actual - base).abs().max()) > 0.02 * spread


def test_adapters_are_added_one_after_the_other(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    given = {"one": llama_adapter(tmp_path / "one", seed=1), "two": llama_adapter(tmp_path / "two", seed=2, rank=3)}
    actual = run_captured(capture(checkpoint_of("llama"), parse_options({"lora": given})), tiny_tokens(5))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for directory in given.values():
            tensors = load_file(directory / "adapter_model.safetensors")
            for name in [name for name in tensors if "lora_A" in name]:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += 2 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        expected = model(torch.tensor([tiny_tokens(5)])).logits[0]
    torch.testing.assert_close(actual, expected, atol=1e-4 * float(expected.std()), rtol=0)


WRONG = {
    "model.layers.0.self_attn.q_proj": ((4, 48), (64, 4), "of 48 inputs and 64 outputs, the weight [64, 64]"),
    "model.layers.7.self_attn.q_proj": ((4, 64), (64, 4), "no linear layer 'layers.7.self_attn.q_proj'"),
    "model.layers.0.mixer": ((4, 64), (64, 4), "no linear layer 'layers.0.mixer'"),
}


@pytest.mark.parametrize("module", WRONG)
def test_another_models_adapter_is_refused(module: str, checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    a, b, problem = WRONG[module]
    tensors = {f"{module}.lora_A.weight": torch.zeros(a), f"{module}.lora_B.weight": torch.zeros(b)}
    with pytest.raises(AdapterError) as raised:
        _captured(checkpoint_of("llama"), written_adapter(tmp_path / "adapter", tensors))
    assert problem in str(raised.value)


@pytest.mark.parametrize("config", [{"modules_to_save": ["lm_head", "embed_tokens"]}, {"target_modules": ["lm_head"]}])
def test_an_adapter_with_more_tokens_names_both_sizes(
    config: dict[str, Any], checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT writes a trained matrix up to three times then: by its name, as it was trained, and as it was before."""
    model = tiny_model("llama")
    model.resize_token_embeddings(163, mean_resizing=False)
    peft_adapter(model, tmp_path, **{"target_modules": ["q_proj"], "r": 2, **config})
    with pytest.raises(
        AdapterError, match=r"trained on a model with 163 tokens \(.*\), and this one has 160"
    ) as raised:
        _captured(checkpoint_of("llama"), tmp_path)
    assert "resize_token_embeddings(163)" in str(raised.value.fix)


def test_of_a_trained_weight_that_is_written_several_times_one_is_taken(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    weight = torch.randn(160, 64)
    names = ("lm_head.weight", "lm_head.modules_to_save.weight", "lm_head.original_module.weight")
    tensors = {name: weight.clone() for name in names} | {names[-1]: torch.zeros(160, 64)}
    captured = _captured(checkpoint_of("llama"), written_adapter(tmp_path / "adapter", tensors))
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
        expected = model(torch.tensor([tiny_tokens(5)])).logits[0]
    torch.testing.assert_close(run_captured(captured, tiny_tokens(5)), expected, atol=1e-4, rtol=0)
    tensors[names[1]][0, 0] += 1
    with pytest.raises(AdapterError, match=r"modules_to_save\.weight and .* are one weight, and differ"):
        _captured(checkpoint_of("llama"), written_adapter(tmp_path / "adapter", tensors))
