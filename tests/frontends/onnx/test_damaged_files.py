"""Damaged ONNX files, by chance: an error of llmc's or a right answer, and nothing is read outside."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from onnx import helper
from torch._subclasses.fake_tensor import FakeTensor

import llmc.ops  # noqa: F401
from llmc.errors import LlmcError
from llmc.frontends.capture import capture
from llmc.frontends.onnx.capture import read_decoder
from llmc.frontends.onnx.source import OnnxSource
from llmc.options import BuildOptions
from tests.frontends.onnx.graphs import WIDTH, attention_layer, decoder
from tests.frontends.onnx.graphs import random as numbers

_LONG = 2**64


@pytest.fixture(scope="module")
def whole() -> bytes:
    """A layer of attention, codes of two kinds, a function, and shapes that are computed."""
    import numpy as np

    nodes, tensors, inputs = attention_layer(local_window_size=4)
    tensors |= {
        "codes": np.arange(WIDTH * 8, dtype=np.uint8).reshape(WIDTH, 1, 8),
        "scales": numbers(WIDTH),
        "more": np.arange(WIDTH * WIDTH, dtype=np.uint8).reshape(WIDTH, WIDTH),
        "more_zeros": np.arange(WIDTH, dtype=np.uint8),
        "factor": np.asarray(0.5, np.float32),
        "joined": np.asarray([0, -1, WIDTH], np.int64),
    }
    nodes += [
        helper.make_node("Halved", ["y"], ["h"], domain="own"),
        helper.make_node(
            "MatMulNBits",
            ["h", "codes", "scales"],
            ["c"],
            domain="com.microsoft",
            K=WIDTH,
            N=WIDTH,
            bits=4,
            block_size=16,
        ),
        helper.make_node("DequantizeLinear", ["more", "scales", "more_zeros"], ["w"], axis=1),
        helper.make_node("MatMul", ["c", "w"], ["d"]),
        helper.make_node("Reshape", ["d", "joined"], ["z"]),
        helper.make_node("Softmax", ["z"], ["p"], axis=-1),
    ]
    constant = helper.make_node("Constant", [], ["f"], value_float=0.5)
    body = [constant, helper.make_node("Mul", ["a", "f"], ["b"])]
    halved = helper.make_function("own", "Halved", ["a"], ["b"], body, [helper.make_opsetid("", 21)])
    return bytes(decoder(nodes, tensors, inputs=inputs, result="p", functions=[halved]).SerializeToString())


def _opened(content: bytes, folder: Path, *, whole: bool) -> None:
    """Every operator translated, for seven tokens, and every weight read. whole: all that a capture does."""
    folder.mkdir()
    file = folder / "model.onnx"
    file.write_bytes(content)
    if whole:
        capture(file, BuildOptions())
    source = OnnxSource(file)
    read = read_decoder(source, BuildOptions())
    mode = next(
        parameter.data.fake_mode for parameter in read.decoder.parameters() if isinstance(parameter.data, FakeTensor)
    )
    with mode:
        read.decoder(torch.zeros(1, 7, dtype=torch.int64), torch.arange(7).unsqueeze(0))
    for name in source.names():
        assert tuple(source.load(name).shape) == source.shape(name)


def _mutated(content: bytes, chance: random.Random) -> bytes:
    """Bits, bytes, numbers and lengths changed, or a part cut out or off."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(changed))
        kind = chance.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.randrange(256)
        elif kind == 2:
            number = chance.choice((0, 1, 127, 2**31, 2**62, 2**63 - 1, 2**63, _LONG - 1))
            changed[at : at + 8] = struct.pack("<Q", number)[: len(changed) - at]
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 64)]
        elif chance.random() < 0.2:
            changed = changed[: max(1, at)]
    return bytes(changed)


def _try_mutations(whole: bytes, folder: Path, count: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    refused = 0
    for number in range(count):
        try:
            _opened(_mutated(whole, chance), folder / str(number), whole=number % 20 == 0)
        except LlmcError:
            refused += 1
    return refused, count


def test_some_damaged_files_are_refused_or_right(whole: bytes, tmp_path: Path) -> None:
    _opened(whole, tmp_path / "whole", whole=True)
    refused, count = _try_mutations(whole, tmp_path, 12, seed=20260714)
    assert count // 4 < refused < count


@pytest.mark.slow
def test_two_thousand_damaged_files_are_refused_or_right(whole: bytes, tmp_path: Path) -> None:
    refused, count = _try_mutations(whole, tmp_path, 2000, seed=7)
    assert count // 4 < refused < count
