"""What a GGUF file says of each architecture makes transformers' model of it again: config and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from llmc.errors import CheckpointError
from llmc.frontends.gguf.architectures import ARCHITECTURES
from llmc.frontends.open_model import local_model, open_model
from llmc.frontends.transformers.config import load_config
from llmc.frontends.transformers.names import stored_recipes
from llmc.frontends.transformers.skeleton import skeleton
from llmc.graph.weights import evaluate
from tests.gguf_families import GGUF_FAMILIES, family_model
from tests.gguf_files import CONVERTERS, write_gguf, write_out
from tests.tiny_models import tiny_tokens

_TOKENS = torch.tensor([tiny_tokens(21)])


def rebuilt(path: Path) -> Any:
    """The file as a transformers model in fp32, by what a capture reads of it."""
    directory = local_model(path)
    loaded = load_config(directory)
    source = open_model(directory).weights
    model = skeleton(loaded.model_class, loaded.config, torch.float32)
    stored = stored_recipes(model, source)
    assert not stored.notes
    values = {name: evaluate(recipe, source).float() for name, recipe in stored.recipes.items()}
    model.load_state_dict(values, assign=True)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_the_model_that_a_file_makes_is_the_one_that_was_written(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = family_model(family)
    model.load_state_dict(write_gguf(path, model, "Q8_0"), strict=False)
    with torch.no_grad():
        expected, actual = model(_TOKENS).logits, rebuilt(path)(_TOKENS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_every_architecture_is_tested() -> None:
    assert {converter.architecture for converter in CONVERTERS.values()} == set(ARCHITECTURES)
    assert set(GGUF_FAMILIES) == set(CONVERTERS)


def test_an_unknown_architecture_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "rwkv7")
    write_out(writer)
    with pytest.raises(CheckpointError, match="architecture 'rwkv7' is not supported in GGUF files") as caught:
        local_model(tmp_path / "t.gguf")
    assert "llama, qwen2, qwen3, gemma" in str(caught.value.fix)


def test_a_tensor_that_the_architecture_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path, family_model("llama"), extra={"blk.1.attn_surprise.weight": torch.zeros(4, 32)})
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_surprise\.weight"):
        local_model(path)


@pytest.mark.parametrize(
    ("low", "high", "original", "factor"), [(1.0, 4.0, 8192, 8.0), (1.0, 4.0, 8192, 32.0), (1.0, 2.5, 4096, 16.0)]
)
def test_llama3_settings_are_found_again_in_its_factors(
    low: float, high: float, original: int, factor: float, tmp_path: Path
) -> None:
    """By the frequencies that transformers makes of them; the factors are those of Meta's reference."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    path = tmp_path / "t.gguf"
    rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    model = family_model("llama", attention_bias=False, head_dim=64, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2) / 64))
    write_gguf(path, model, extra={"rope_freqs.weight": plain / frequencies})
    config = load_config(local_model(path)).config
    again, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(again, frequencies, rtol=1e-4, atol=0.0)
    assert config.rope_parameters["original_max_position_embeddings"] == original
