"""Model directories whose files say different things: what is taken, what is refused, and what a build says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmc.errors import CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.given_tokenizer import with_tokenizer
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers import capture_cache
from llmc.frontends.transformers.capture import ReadModel, read_directory
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from llmc.settings import read_settings
from tests.frontends.checkpoints import edit_json, edit_weights
from tests.frontends.test_capture_hf import assert_equals_eager
from tests.tiny_models import saved, tiny_model

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def read(directory: Path) -> ReadModel:
    return read_directory(open_model(directory), BuildOptions())


def stored(model: ReadModel, name: str) -> str:
    recipe = model.recipes[name]
    assert isinstance(recipe, Stored)
    return recipe.name


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """Two layers' tensors, of which the output matrix is another than the embeddings."""
    return saved(tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False), tmp_path / "model")


def test_an_output_matrix_of_its_own_is_kept_whatever_the_config_says(untied: Path) -> None:
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=True))
    captured = capture(untied, BuildOptions())
    assert [note for note in captured.notes if "lm_head.weight to model.embed_tokens.weight" in note]
    expected: Any = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    assert expected.lm_head.weight is not expected.model.embed_tokens.weight, "transformers has another rule now"
    assert_equals_eager(captured, expected)


def test_an_output_matrix_under_its_older_name_is_a_copy_too(tmp_path: Path) -> None:
    directory = saved(tiny_model("gpt_neox", num_hidden_layers=1, tie_word_embeddings=False), tmp_path)
    edit_json(directory / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert stored(read(directory), HEAD) == "embed_out.weight"


@pytest.mark.parametrize("change", [lambda t: t.clone(), lambda t: t.double()])
def test_equal_copies_are_one(change: Callable[[Tensor], Tensor], untied: Path) -> None:
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=True))
    edit_weights(untied, lambda tensors: {**tensors, HEAD: change(tensors[EMBEDDINGS])})
    model = read(untied)
    assert model.notes == () and stored(model, HEAD) == stored(model, EMBEDDINGS) == EMBEDDINGS


def test_one_bit_in_the_last_row_is_a_difference(untied: Path) -> None:
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=True))

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors[EMBEDDINGS].clone()
        head.view(torch.int32)[-1, -1] ^= 1
        return {**tensors, HEAD: head}

    edit_weights(untied, changed)
    assert stored(read(untied), HEAD) == HEAD


def test_an_output_matrix_of_more_tokens_is_refused_with_both_sizes(untied: Path) -> None:
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=True))
    edit_weights(untied, lambda tensors: {**tensors, HEAD: torch.randn(170, 64)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight' has shape \[170, 64\], but .* \[160, 64\]"):
        read(untied)


def test_two_names_of_one_tensor_that_differ_are_refused(untied: Path) -> None:
    name = "layers.0.mlp.up_proj.weight"
    edit_weights(untied, lambda tensors: {**tensors, name: tensors[f"model.{name}"] + 1})
    with pytest.raises(CheckpointError, match=f"'model.{name}' and '{name}' are one tensor in the model and differ"):
        read(untied)
    edit_weights(untied, lambda tensors: {**tensors, name: tensors[f"model.{name}"].clone()})
    assert stored(read(untied), f"model.{name}") == f"model.{name}"


def test_a_kept_capture_is_of_copies_that_are_alike(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture's key has names and shapes, and which tensors are tied follows from their numbers."""
    monkeypatch.setattr(capture_cache, "settings", lambda: read_settings({"LLMC_CAPTURE_CACHE": "always"}))
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=True))
    different = load_file(untied / "model.safetensors")
    equal = {**different, HEAD: different[EMBEDDINGS].clone()}
    read_by = []
    for tensors in (equal, different, equal, different):
        save_file(tensors, untied / "model.safetensors", {"format": "pt"})
        weights = capture(untied, BuildOptions()).graph.weights.values()
        read_by.append(HEAD in {recipe.name for recipe in weights if isinstance(recipe, Stored)})
    assert read_by == [False, True, False, True]


def test_a_checkpoint_without_an_output_matrix_is_tied_unless_its_config_objects(untied: Path) -> None:
    edit_weights(untied, lambda tensors: {name: t for name, t in tensors.items() if name != HEAD})
    edit_json(untied / "config.json", lambda c: c.pop("tie_word_embeddings", None))
    model = read(untied)
    assert stored(model, HEAD) == EMBEDDINGS
    (note,) = model.notes
    assert note == (
        "the checkpoint has no lm_head.weight, and config.json no tie_word_embeddings: "
        "the embeddings are the output matrix"
    )
    edit_json(untied / "config.json", lambda c: c.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lacks 1 of the model's \d+ tensors: lm_head.weight") as caught:
        read(untied)
    assert "tie_word_embeddings to true" in str(caught.value.fix)


# What generation_config.json, config.json and the tokenizer name, and where texts end then.
ENDS: tuple[tuple[Any, Any, Any, tuple[int, ...]], ...] = (
    (6, 5, "<a>", (6, 5, 7)),
    ([6, 8], 6, "<a>", (6, 8, 7)),
    (None, [5, 6], "<a>", (5, 6, 7)),
    (6, None, None, (6,)),
    (None, None, "<a>", (7,)),
    (None, None, {"content": "<b>", "lstrip": False}, (8,)),
    (7, 7, "<a>", (7,)),
    (6, 999, "<missing>", (6,)),
)


@pytest.fixture
def with_vocabulary(untied: Path) -> Iterator[Path]:
    tokenizer = Tokenizer(BPE(vocab={chr(97 + i): i for i in range(7)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<a>"), AddedToken("<b>")])
    tokenizer.save(str(untied / "tokenizer.json"))
    yield untied


@pytest.mark.parametrize(("generation", "config", "tokenizer", "ends"), ENDS)
def test_texts_end_at_every_token_that_a_file_names(
    generation: Any, config: Any, tokenizer: Any, ends: tuple[int, ...], with_vocabulary: Path
) -> None:
    directory = with_vocabulary
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "bos_token_id": 3}))
    edit_json(directory / "config.json", lambda c: c.update(eos_token_id=config, bos_token_id=4))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    captured = with_tokenizer(capture(directory, BuildOptions()), None)
    assert captured.graph.info.eos_token_ids == ends and captured.graph.info.bos_token_id == 3
    said = " ".join(captured.notes)
    assert ("eos_token_id 999 is not among" in said) is (config == 999)
    assert ("'<missing>' the end of a text, and the tokenizer has no such token" in said) is (tokenizer == "<missing>")


def test_a_class_of_transformers_names_an_end_only_where_no_file_does(with_vocabulary: Path) -> None:
    """LlamaConfig has 2 for models that state none."""
    directory = with_vocabulary
    edit_json(directory / "config.json", lambda c: (c.pop("eos_token_id"), c.pop("bos_token_id")))
    (directory / "generation_config.json").unlink()
    assert capture(directory, BuildOptions()).graph.info.eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert capture(directory, BuildOptions()).graph.info.eos_token_ids == (5,)


def test_the_tokens_that_a_tokenizer_has_beyond_the_model_are_named(with_vocabulary: Path) -> None:
    directory = with_vocabulary
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([f"word{index}" for index in range(200)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "word199"}))
    captured = with_tokenizer(capture(directory, BuildOptions()), None)
    assert captured.notes[0].startswith("the tokenizer has 209 tokens, the model 160")
    assert "call 'word199' the end of a text, and its id, 208, is not in the model's vocabulary" in captured.notes[1]
