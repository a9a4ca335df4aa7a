"""Damaged GGUF files, by chance and by design: an error of llmc's or a right answer, and nothing is read outside."""

from __future__ import annotations

import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from llmc.errors import CheckpointError, LlmcError
from llmc.frontends.captured import check_tokenizer
from llmc.frontends.gguf.container import read_model
from llmc.frontends.gguf.model_directory import write_description
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers.capture import read_directory
from llmc.options import BuildOptions
from tests.gguf_families import family_model
from tests.gguf_files import CONVERTERS, add_sentence_piece, names_in_file, write_gguf

_LONG = 2**64


_SUPER_BLOCKS = {
    "attn_q": "Q2_K",
    "attn_k": "Q3_K",
    "attn_v": "Q4_K",
    "ffn_down": "Q5_K",
    "up": "Q6_K",
    "gate": "IQ4_XS",
}
# What files hold beside Q4_0, and their models' sizes.
_FILES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "blocks": ({"ffn_down": "Q8_0", "ffn_up": "Q4_1", "attn_q": "Q5_1", "attn_k": "IQ4_NL", "attn_o": "F16"}, {}),
    "super-blocks": (_SUPER_BLOCKS, {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}),
}


@pytest.fixture(scope="module", params=_FILES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with codes, numbers, and a vocabulary."""
    kinds, sizes = _FILES[request.param]
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(100)]
    pieces += [(f"{letter}", -1.0, 1) for letter in "abcdef"] + [("ab", -2.0, 1), ("abc", -3.0, 1)]
    write_gguf(
        path,
        family_model("llama", num_hidden_layers=1, **sizes),
        "Q4_0",
        kinds=kinds,
        add=lambda writer: add_sentence_piece(writer, pieces, begins_with_space=True),
    )
    return path.read_bytes()


def opened(content: bytes, folder: Path) -> bool:
    """Read the file as far as a capture does, and every weight.

    Returns whether the gguf package could also read it, so that the values were compared.
    """
    folder.mkdir()
    path = folder / "model-00001.gguf"
    path.write_bytes(content)
    expected: dict[str, NDArray[Any]] = {}
    write_description(read_model((path,)), folder)
    check_tokenizer(folder)
    model = open_model(folder)
    read_directory(model, BuildOptions())
    source = model.weights
    with suppress(ValueError, KeyError, IndexError, UnicodeDecodeError):  # It refuses less, but other things.
        expected = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
        }
    for name in source.names():
        values = source.load(name)
        assert values.shape == source.shape(name)
        if expected:
            _check_values(values, [expected[stored] for stored in names_in_file(CONVERTERS["llama"], name)])
    return bool(expected)


def _check_values(found: Tensor, expected: list[NDArray[Any]]) -> None:
    """Compare values in any order: rows of Q and K are permuted by their heads, whose number may be damaged."""
    values = np.sort(np.concatenate([block.reshape(-1) for block in expected]).astype(np.float32))
    assert np.array_equal(np.sort(found.float().numpy().reshape(-1)), values, equal_nan=True)


def _mutated(content: bytes, chance: random.Random, header: int) -> bytes:
    """Bits, bytes, numbers and lengths changed, mostly in front of the weights, or a part cut off."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(min(header, len(changed)) if chance.random() < 0.9 else len(changed))
        kind = chance.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.randrange(256)
        elif kind == 2:
            number = chance.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, _LONG - 1, _LONG - 32))
            changed[at : at + 8] = struct.pack("<Q", number)[: len(changed) - at]
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 64)]
        else:
            changed = changed[: max(1, at)]
    return bytes(changed)


def _try_mutations(whole: bytes, folder: Path, count: int, seed: int) -> None:
    """Some are refused, and of the others most can be compared."""
    assert opened(whole, folder / "whole")
    chance = random.Random(seed)
    header = whole.index(b"output_norm.weight") + 4096
    refused = compared = 0
    for number in range(count):
        try:
            compared += opened(_mutated(whole, chance, header), folder / str(number))
        except LlmcError:
            refused += 1
        shutil.rmtree(folder / str(number))
    assert count // 4 < refused < count and (count - refused) // 2 < compared


def test_fifty_damaged_files_are_refused_or_right(whole: bytes, tmp_path: Path) -> None:
    _try_mutations(whole, tmp_path, 50, seed=20260714)


@pytest.mark.slow
def test_two_thousand_damaged_files_are_refused_or_right(whole: bytes, tmp_path: Path) -> None:
    _try_mutations(whole, tmp_path, 2000, seed=7)


def _header(tensors: int = 0, metadata: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, metadata)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(shape: tuple[int, ...], *, kind: int = 0, offset: int = 0, name: str = "a") -> bytes:
    """shape: as in files, innermost first."""
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def _refused(content: bytes, tmp_path: Path, match: str) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        read_model((path,))


def test_cve_2026_27940_a_number_of_tensors_whose_memory_overflows(tmp_path: Path) -> None:
    """llama.cpp took (tensors + 1) times the size of an entry, plus the data, in 64 bits, and wrote beyond that."""
    for count in (_LONG - 1, _LONG // 368, 2**61):
        _refused(_header(tensors=count) + bytes(4096), tmp_path, f"the number of tensors is {count}")
    _refused(_header(metadata=2**60) + bytes(4096), tmp_path, "the number of metadata is")


def test_cve_2026_27940_the_sizes_of_tensors_that_add_up_past_64_bits(tmp_path: Path) -> None:
    table = b"".join(_tensor((2**60,), name=name) for name in "abcdefgh")
    _refused(_header(tensors=8) + table + bytes(4096), tmp_path, "ends at byte")


def test_cve_2026_7482_a_tensor_larger_than_the_file(tmp_path: Path) -> None:
    """Ollama believed the shape, and copied what lay behind the file's bytes in memory into a new model."""
    _refused(_header(tensors=1) + _tensor((1024, 1024), kind=1) + bytes(4096), tmp_path, r"ends at byte 20\d{5} of")


@pytest.mark.parametrize(
    ("shape", "offset", "match"),
    [
        ((2**32, 2**32), 0, "has shape"),
        ((2**63, 2), 0, "has shape"),
        ((2**33, 2**31 - 1, 1), 0, "has shape|ends at byte"),
        ((32, 0), 0, "has shape"),
        ((32,), _LONG - 32, "ends at byte"),
        ((32,), 7, "not a multiple of 32"),
        ((1,) * 5, 0, "5 dimensions"),
    ],
)
def test_shapes_and_places_that_would_wrap_around(
    shape: tuple[int, ...], offset: int, match: str, tmp_path: Path
) -> None:
    _refused(_header(tensors=1) + _tensor(shape, offset=offset) + bytes(4096), tmp_path, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (_header(metadata=1) + struct.pack("<Q", 2**63) + bytes(64), "the length of a metadata key"),
        (_header(metadata=1) + _text("k") + struct.pack("<I", 13) + bytes(64), "type 13"),
        (_header(metadata=1) + _text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "an array of type 9"),
        (_header(metadata=1) + _text("k") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64), "the length of 'k'"),
        (_header(metadata=2) + 2 * (_text("k") + struct.pack("<II", 4, 1)) + bytes(64), "appears twice"),
        (_header(tensors=2) + 2 * _tensor((32,)) + bytes(512), "appears twice"),
        (_header(tensors=2) + _tensor((32,)) + _tensor((32,), name="b", offset=96) + bytes(512), "overlap"),
        (_header(tensors=1) + _tensor((32,), kind=4) + bytes(512), "ggml type 4"),
        (_header(tensors=1) + _tensor((33,), kind=2) + bytes(512), "rows of 33"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, match: str, tmp_path: Path) -> None:
    _refused(content, tmp_path, match)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.block_count", 4000, "block_count is 4000, where 1 layers have tensors"),
        ("llama.embedding_length", 128, "embedding_length is 128, where (64|256)"),
        ("llama.attention.head_count", 0, "head_count is 0"),
    ],
)
def test_metadata_that_the_tensors_contradict(key: str, value: int, match: str, whole: bytes, tmp_path: Path) -> None:
    at = whole.index(key.encode()) + len(key) + 4
    with pytest.raises(CheckpointError, match=match):
        opened(whole[:at] + struct.pack("<I", value) + whole[at + 4 :], tmp_path / "t")
