"""Codes of MatMulNBits and GatherBlockQuantized: the file's own bits, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import llmc
from llmc.errors import CheckpointError
from llmc.frontends.onnx.source import OnnxSource
from tests.frontends.onnx.eager import TOKENS, assert_as_onnxruntime, assert_same, captured_logits
from tests.frontends.onnx.graphs import VOCABULARY, WIDTH, Array, decoder, random, saved
from tests.quick_sample import quick_sample

_ROWS, _COLUMNS, _BLOCK = 6, 48, 16


def _model(bits: int, zeros: str, columns: int = _COLUMNS) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """y = down·(codes·(up·x)): a product with codes of `bits`. zeros: none, codes, or numbers."""
    chance = np.random.default_rng(bits)
    groups = -(-columns // _BLOCK)
    tensors: dict[str, Array] = {
        "up": random(WIDTH, columns),
        "codes": chance.integers(0, 256, (_ROWS, groups, _BLOCK * bits // 8), dtype=np.uint8),
        "scales": np.abs(random(_ROWS, groups)) + 0.1,
        "down": random(_ROWS, WIDTH),
    }
    inputs = ["z", "codes", "scales"]
    if zeros != "none":
        inputs.append("zeros")
        packed = chance.integers(0, 256, (_ROWS, -(-groups * bits // 8)), dtype=np.uint8)
        whole = chance.integers(0, 1 << bits, (_ROWS, groups)).astype(np.float32)
        tensors["zeros"] = packed if zeros == "codes" else whole
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["z"]),
        helper.make_node(
            "MatMulNBits",
            inputs,
            ["q"],
            name="product",
            domain="com.microsoft",
            K=columns,
            N=_ROWS,
            bits=bits,
            block_size=_BLOCK,
        ),
        helper.make_node("MatMul", ["q", "down"], ["y"]),
    ]
    return decoder(nodes, tensors, result="y"), tensors


def _unsigned(packed: Array, bits: int) -> Array:
    """Codes along the last axis, the low bits first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(len(packed), -1).astype(np.int16)


@pytest.mark.parametrize(
    ("bits", "zeros"),
    quick_sample([(4, "none"), (4, "codes"), (4, "numbers"), (8, "none"), (8, "codes")], [(4, "codes")]),
)
def test_codes_are_the_files_bit_by_bit(bits: int, zeros: str, tmp_path: Path) -> None:
    model, tensors = _model(bits, zeros)
    file = saved(model, tmp_path)
    source, middle = OnnxSource(file), 1 << (bits - 1)
    codes = _unsigned(tensors["codes"].reshape(_ROWS, -1), bits)
    assert np.array_equal(source.load("codes::codes").numpy(), codes - middle)
    assert np.array_equal(source.load("codes::scales").numpy(), tensors["scales"])
    if zeros == "codes":
        expected = _unsigned(tensors["zeros"], bits)[:, : _COLUMNS // _BLOCK] - middle
        assert np.array_equal(source.load("codes::zeros").numpy(), expected)
    assert_as_onnxruntime(file)


def test_an_engine_keeps_them(tmp_path: Path) -> None:
    """Not rounded again: what it computes is what the codes say."""
    model, _ = _model(4, "none")
    file = saved(model, tmp_path)
    with llmc.compile(file, target="reference", output=tmp_path / "engine.llmc") as engine:
        (record,) = [entry for entry in _records(tmp_path / "engine.llmc") if entry["module"] == "codes"]
        assert record["scheme"] == "MatMulNBits int4" and record["error"] is None
        assert_same(np.asarray(engine.logits(list(TOKENS))), captured_logits(file))


def _records(engine: Path) -> list[dict[str, Any]]:
    import json

    from llmc.engine_format.reader import QUANTIZATION_NAME

    records: list[dict[str, Any]] = json.loads((engine / QUANTIZATION_NAME).read_text())
    return records


def test_columns_that_end_within_a_block(tmp_path: Path) -> None:
    """Groups are runs of equal length here: 40 columns in blocks of 16 are five of 8."""
    model, _ = _model(4, "none", columns=40)
    file = saved(model, tmp_path)
    source = OnnxSource(file)
    assert tuple(source.load("codes::scales").shape) == (_ROWS, 5)
    assert_as_onnxruntime(file)


def test_zeros_that_are_no_codes_are_refused(tmp_path: Path) -> None:
    model, _ = _model(4, "numbers")
    (zeros,) = (initializer for initializer in model.graph.initializer if initializer.name == "zeros")
    zeros.raw_data = np.full((_ROWS, _COLUMNS // _BLOCK), 7.5, np.float32).tobytes()
    source = OnnxSource(saved(model, tmp_path))
    with pytest.raises(CheckpointError, match="zero points 'zeros' are not codes"):
        source.load("codes")


@pytest.mark.parametrize(
    ("attribute", "value", "match"),
    [
        ("bits", 3, "its codes have 3 bits, expected 2, 4, 8"),
        ("K", -1, "its attribute K is -1"),
        ("N", 2**40, "its attribute N is 1099511627776"),
        ("weight_prepacked", 2, "packed for one kind of GPU"),
    ],
)
def test_codes_that_are_not_read(attribute: str, value: int, match: str, tmp_path: Path) -> None:
    model, _ = _model(4, "none")
    (node,) = (candidate for candidate in model.graph.node if candidate.op_type == "MatMulNBits")
    kept = [entry for entry in node.attribute if entry.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    with pytest.raises(CheckpointError, match=match):
        OnnxSource(saved(model, tmp_path))


def test_a_table_of_codes_that_is_the_head_too(tmp_path: Path) -> None:
    """As onnxruntime-genai shares them: the head's codes, reshaped, are looked up."""
    chance = np.random.default_rng(3)
    tensors: dict[str, Array] = {
        "codes": chance.integers(0, 256, (VOCABULARY, 1, 8), dtype=np.uint8),
        "scales": np.abs(random(VOCABULARY, 1)),
        "flat": np.asarray([VOCABULARY, 8], np.int64),
        "narrow": random(16, WIDTH),
        "wide": random(WIDTH, 16),
    }
    nodes = [
        helper.make_node("Reshape", ["codes", "flat"], ["table_codes"]),
        helper.make_node(
            "GatherBlockQuantized",
            ["table_codes", "input_ids", "scales"],
            ["row"],
            domain="com.microsoft",
            bits=4,
            block_size=16,
            quantize_axis=1,
            gather_axis=0,
        ),
        helper.make_node("MatMul", ["row", "narrow"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "wide"], ["w"]),
        helper.make_node(
            "MatMulNBits",
            ["w", "codes", "scales"],
            ["product"],
            domain="com.microsoft",
            K=16,
            N=VOCABULARY,
            bits=4,
            block_size=16,
        ),
        helper.make_node("MatMul", ["product", "back"], ["y"]),
    ]
    tensors["back"] = random(VOCABULARY, WIDTH)
    file = saved(decoder(nodes, tensors, result="y"), tmp_path)
    assert_as_onnxruntime(file)
    source = OnnxSource(file)
    assert torch.equal(source.load("table_codes::codes"), source.load("codes::codes"))
