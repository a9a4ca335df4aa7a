"""A model directory that was changed in any way gives an LlmcError or a model, never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import LlmcError
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers.capture import read_directory
from llmc.options import BuildOptions
from tests.frontends.checkpoints import edit_json, split_into_shards
from tests.tiny_models import tiny_checkpoint

# Of each file; one whose values seldom stop a model from being made takes long to read.
MUTATIONS = {
    "config.json": 150,
    "generation_config.json": 25,
    "model.safetensors.index.json": 60,
    "model.safetensors": 150,
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**70, 1e400, -0.5, float("nan"), "", "x", "\0", "../x", [], [1], [None],
    ["x"], {}, {"x": 1}, {"rope_type": "yarn"}, {"rope_type": 7}, [[[]]],
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sound")
    single = tiny_checkpoint("llama", root / "single")
    sharded = Path(shutil.copytree(single, root / "sharded"))
    split_into_shards(sharded)
    return {"single": single, "sharded": sharded}


def only_index(directory: Path, text: str) -> None:
    """An index, and nothing that goes before it."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(text)


def outcome(directory: Path) -> str:
    """What reading it says; anything but an LlmcError is a failure of the test."""
    try:
        read_directory(open_model(directory), BuildOptions())
    except LlmcError as error:
        assert error.problem.strip() and error.at is not None
        return error.problem
    return ""


def somewhere(value: Any, dice: random.Random) -> tuple[Any, Any]:
    """A dict or list inside a JSON value, and one of its keys."""
    places = [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
    holders: list[tuple[Any, Any]] = []
    while places:
        holder, key = places.pop()
        holders.append((holder, key))
        inner = holder[key]
        if isinstance(inner, dict | list):
            places += [(inner, index) for index in (inner if isinstance(inner, dict) else range(len(inner)))]
    return dice.choice(holders)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_changed_json(sound: dict[str, Path], tmp_path: Path, file: str) -> None:
    dice = random.Random(file)
    directory = Path(shutil.copytree(sound["sharded"], tmp_path / "model"))
    text = (directory / file).read_text()
    said = set()
    for _ in range(MUTATIONS[file]):
        content = json.loads(text)
        holder, key = somewhere(content, dice)
        holder[key] = dice.choice(VALUES)
        (directory / file).write_text(json.dumps(content))
        said.add(outcome(directory))
    assert len(said) > 2, said


def test_changed_headers(sound: dict[str, Path], tmp_path: Path) -> None:
    dice = random.Random(7)
    directory = Path(shutil.copytree(sound["single"], tmp_path / "model"))
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    said = set()
    for _ in range(MUTATIONS[weights.name]):
        data = bytearray(whole)
        for _ in range(dice.choice((1, 1, 3, 30))):
            data[dice.randrange(length)] = dice.randrange(256)
        weights.write_bytes(data)
        said.add(outcome(directory))
    assert len(said) > 10


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: (m / "config.json").write_text(NESTED), "cannot read it as JSON"),
        (lambda m: (m / "generation_config.json").write_text(NESTED), "cannot read it as JSON"),
        (lambda m: (m / "model.safetensors.index.json").write_text(NESTED), "cannot read it as JSON"),
        (
            lambda m: (m / "model.safetensors").write_bytes(len(NESTED).to_bytes(8, "little") + NESTED.encode()),
            "corrupt header",
        ),
        (
            lambda m: only_index(m, '{"weight_map": {"a": "model\\u0000.safetensors"}}'),
            r"the shard index names no file: 'model\\x00.safetensors'",
        ),
        (
            lambda m: only_index(m, f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}'),
            "shard x{80} cannot be read: File name too long",
        ),
        (lambda m: edit_json(m / "config.json", lambda c: c.update(num_hidden_layers=0)), "num_hidden_layers is 0"),
        (lambda m: edit_json(m / "config.json", lambda c: c.update(num_hidden_layers=-2)), "num_hidden_layers is -2"),
        (lambda m: edit_json(m / "config.json", lambda c: c.update(pad_token_id=99999)), "pad_token_id is not in the"),
        (
            lambda m: edit_json(m / "generation_config.json", lambda c: c.update(eos_token_id="x")),
            "eos_token_id is 'x', not a whole number",
        ),
        (
            lambda m: edit_json(m / "config.json", lambda c: c.update(num_hidden_layers=1, tie_word_embeddings=True)),
            None,
        ),
    ],
)
def test_what_is_said_of(
    sound: dict[str, Path], tmp_path: Path, change: Callable[[Path], object], says: str | None
) -> None:
    directory = Path(shutil.copytree(sound["single"], tmp_path / "model"))
    change(directory)
    if says is not None:
        with pytest.raises(LlmcError, match=says):
            read_directory(open_model(directory), BuildOptions())
        return
    tied, note = read_directory(open_model(directory), BuildOptions()).notes
    assert tied.startswith("config.json ties lm_head.weight")
    assert note.startswith("9 tensors of the checkpoint are not used: model.layers.1.input_layernorm.weight, ")


def test_the_heads_of_each_layer_are_looked_at(tmp_path: Path) -> None:
    tiny_architecture("gemma4_text").save_pretrained(tmp_path)
    if "per_layer_config" not in (tmp_path / "config.json").read_text(encoding="utf-8"):
        pytest.skip("in this transformers all layers have one config")
    edit_json(tmp_path / "config.json", lambda c: c["per_layer_config"]["1"].update(head_dim=2**40))
    assert outcome(tmp_path) == "head_dim is 1099511627776, expected 1 to 65536"


def test_one_tensor_that_is_not_used_is_named(sound: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sound["single"], tmp_path / "model"))
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | {"model.layers.77.extra": torch.zeros(4)}, weights, {"format": "pt"})
    (note,) = read_directory(open_model(directory), BuildOptions()).notes
    assert note == "1 tensor of the checkpoint is not used: model.layers.77.extra"


def test_a_checkpoint_that_is_mostly_unread_is_refused(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=4)
    edit_json(directory / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(LlmcError, match=r"the model reads 12 of the checkpoint's tensors, and not these 27"):
        read_directory(open_model(directory), BuildOptions())


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_token_ids_beyond_the_vocabulary_are_ignored_and_named(
    file: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(sound["single"], tmp_path / "model"))
    edit_json(directory / file, lambda c: c.update(eos_token_id=[1, 5000]))
    read = read_directory(open_model(directory), BuildOptions())
    assert read.info.eos_token_ids == (1,)
    assert read.notes == ("eos_token_id 5000 is not among the 160 tokens of the vocabulary: it is ignored",)
