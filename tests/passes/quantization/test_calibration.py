"""Calibration data as text and as ids; what cannot be used is refused with what was seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.stage import Stage
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from tests.cli.command import MODEL
from tests.prefixed_tokenizer import BOS, write_prefixed_tokenizer

_IDS = np.arange(1000) % 96


def _sequences(path: Path, tokenizer: Path | None = None, vocab_size: int = 96) -> tuple[Tensor, ...]:
    info = ModelInfo("model", "llama", vocab_size, max_positions=None, dtype=torch.float32)
    graph = ModelGraph(fx.Graph(), Stage.CANONICAL, {}, info)
    options = parse_options({"quantize": "int4-gptq", "calibration": path, "calibration_length": 64})
    return calibration_sequences(graph, options, ModelData(MemorySource({}), tokenizer))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_reads_an_array_of_ids(dtype: type, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", _IDS.astype(dtype).reshape(10, 100))
    sequences = _sequences(tmp_path / "ids.npy")
    assert [len(part) for part in sequences] == [64] * 15 + [40]
    assert torch.equal(torch.cat(sequences), torch.from_numpy(_IDS))


def test_reads_a_text_with_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    text = "ab " * 600
    (tmp_path / "text.txt").write_text(text)
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    assert torch.cat(_sequences(tmp_path / "text.txt", MODEL / "tokenizer.json", max(ids) + 1)).tolist() == ids
    with pytest.raises(OptionError, match=f"token id {max(ids)} is not in the vocabulary of {max(ids)}"):
        _sequences(tmp_path / "text.txt", MODEL / "tokenizer.json", max(ids))


def test_each_sequence_of_a_text_begins_as_a_prompt_does(tmp_path: Path) -> None:
    """With the special tokens that the tokenizer puts before a text, which count towards the length."""
    path, text = tmp_path / "tokenizer.json", "ab " * 600
    ids = write_prefixed_tokenizer(path).encode(text).ids
    (tmp_path / "text.txt").write_text(text)
    sequences = _sequences(tmp_path / "text.txt", path, max(ids) + 1)
    assert len(sequences) > 2 and {len(part) for part in sequences[:-1]} == {64}
    assert all(part[0] == BOS for part in sequences)
    assert torch.cat([part[1:] for part in sequences]).tolist() == ids[1:]


def test_special_tokens_before_a_text_are_of_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ids = write_prefixed_tokenizer(path, bos=5000).encode("ab " * 600).ids
    (tmp_path / "text.txt").write_text("ab " * 600)
    with pytest.raises(OptionError, match="token id 5000 is not in the vocabulary of 5000"):
        _sequences(tmp_path / "text.txt", path, 5000)
    assert max(ids[1:]) < 5000


def test_padding_is_no_prefix(tmp_path: Path) -> None:
    path, text = tmp_path / "tokenizer.json", "ab " * 600
    tokenizer = write_prefixed_tokenizer(path)
    ids = tokenizer.encode(text).ids
    tokenizer.enable_padding(direction="left", length=len(ids) + 100)
    tokenizer.save(str(path))
    (tmp_path / "text.txt").write_text(text)
    sequences = _sequences(tmp_path / "text.txt", path, max(ids) + 1)
    assert [*sequences[0][:1], *torch.cat([part[1:] for part in sequences])] == ids


@pytest.mark.parametrize(("token", "name"), [(96, "96"), (-1, "-1"), (50_000, "50000")])
def test_names_an_id_beyond_the_vocabulary(token: int, name: str, tmp_path: Path) -> None:
    ids = _IDS.copy()
    ids[7] = token
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(OptionError, match=f"token id {name} is not in the vocabulary of 96") as caught:
        _sequences(tmp_path / "ids.npy")
    assert caught.value.at == str(tmp_path / "ids.npy")


def test_refuses_numbers_that_are_no_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", _IDS / 2)
    with pytest.raises(OptionError, match="the calibration data are float64, not whole numbers"):
        _sequences(tmp_path / "ids.npy")


@pytest.mark.parametrize(
    ("name", "content"),
    [("text.txt", "Größe".encode("latin-1")), ("ids.json", b"[1, 2"), ("ids.npy", b"no array"), ("none.txt", None)],
)
def test_refuses_what_it_cannot_read(name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match="cannot read the calibration data: ") as caught:
        _sequences(tmp_path / name)
    assert caught.value.at == str(tmp_path / name)
    assert caught.value.fix == "name a UTF-8 text, or ids as .json or .npy"


def test_a_text_takes_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text " * 1000)
    with pytest.raises(OptionError, match=r"the model has no tokenizer\.json for the calibration text") as caught:
        _sequences(tmp_path / "text.txt")
    assert "give token ids" in str(caught.value.fix)
