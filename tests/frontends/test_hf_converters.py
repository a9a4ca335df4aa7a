"""What transformers makes of a directory's tensors when it loads them, made by recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import CheckpointError
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers.capture import read_directory
from llmc.graph.weights import evaluate
from llmc.options import BuildOptions


# A tensor for each expert; gate and up apart; rows of both in turn; in a list; with a shared expert. Heads as wide as
# each layer says; attention that is chosen when the model is made.
@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "granitemoe", "aria_text", "ernie4_5_moe", "gemma4_text", "git"]
)
def test_tensors_are_those_that_transformers_loads(model_type: str, tmp_path: Path) -> None:
    tiny_architecture(model_type).save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    opened = open_model(tmp_path)
    read = read_directory(opened, BuildOptions(dtype="float32"))
    assert read.recipes.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(evaluate(read.recipes[name], opened.weights), tensor), name
    assert read.notes == ()


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_architecture("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        read_directory(open_model(tmp_path), BuildOptions(dtype="float32"))
