"""Weights of codes behind DequantizeLinear: taken as they are stored, whichever way a matrix lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import llmc
from llmc.engine_format.reader import QUANTIZATION_NAME
from llmc.errors import CheckpointError
from llmc.frontends.onnx.source import OnnxSource
from tests.frontends.onnx.eager import TOKENS, assert_as_onnxruntime, assert_same, captured_logits
from tests.frontends.onnx.graphs import WIDTH, Array, decoder, random, saved
from tests.quick_sample import quick_sample

_IN, _OUT, _BLOCK = 32, 6, 16
_RANGES = {"INT8": (-128, 128), "UINT8": (0, 256), "INT4": (-8, 8), "UINT4": (0, 16)}
# Type, how scales go, whether the matrix is [in, out], whether there are zeros.
_CASES = [
    (kind, way, turned, zeros)
    for kind in _RANGES
    for way in ("tensor", "outputs", "blocks")
    for turned in (True, False)
    for zeros in (True, False)
]


def _model(kind: str, way: str, turned: bool, zeros: bool) -> tuple[onnx.ModelProto, Array]:
    chance = np.random.default_rng(3)
    low, high = _RANGES[kind]
    codes = chance.integers(low, high, (_OUT, _IN))
    groups = _IN // _BLOCK if way == "blocks" else 1
    shape = {"tensor": (), "outputs": (_OUT,), "blocks": (_OUT, groups)}[way]
    scales = (np.abs(chance.standard_normal(shape)) + 0.1).astype(np.float32)
    middles = chance.integers(low, high, shape)
    element = TensorProto.DataType.Value(kind)

    def stored(name: str, values: Array) -> onnx.TensorProto:
        values = values.T if turned else values
        return helper.make_tensor(name, element, values.shape, values.flatten().tolist())

    attributes: dict[str, Any] = {"axis": {True: 1, False: 0}[turned]}
    if way == "blocks":
        attributes = {"axis": {True: 0, False: 1}[turned], "block_size": _BLOCK}
    given = ["codes", "scales", *(["zeros"] if zeros else [])]
    turn = [] if turned else [helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0])]
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["z"]),
        helper.make_node("DequantizeLinear", given, ["w"], name="weight", **attributes),
        *turn,
        helper.make_node("MatMul", ["z", "w" if turned else "turned"], ["q"]),
        helper.make_node("MatMul", ["q", "down"], ["y"]),
    ]
    tensors = {"up": random(WIDTH, _IN), "down": random(_OUT, WIDTH)}
    model = decoder(nodes, {**tensors, "scales": np.ascontiguousarray(scales.T if turned else scales)}, result="y")
    model.graph.initializer.append(stored("codes", codes))
    if zeros:
        model.graph.initializer.append(stored("zeros", middles))
    return model, codes - (0 if low else (high // 2))


@pytest.mark.parametrize(("kind", "way", "turned", "zeros"), quick_sample(_CASES, [("UINT4", "blocks", True, True)]))
def test_codes_are_the_files(kind: str, way: str, turned: bool, zeros: bool, tmp_path: Path) -> None:
    model, codes = _model(kind, way, turned, zeros)
    file = saved(model, tmp_path)
    assert np.array_equal(OnnxSource(file).load("codes::codes").numpy(), codes)
    assert_as_onnxruntime(file)


def test_an_engine_keeps_them(tmp_path: Path) -> None:
    file = saved(_model("INT4", "blocks", True, False)[0], tmp_path)
    with llmc.compile(file, target="reference", output=tmp_path / "engine.llmc") as engine:
        assert '"DequantizeLinear int4"' in (tmp_path / "engine.llmc" / QUANTIZATION_NAME).read_text()
        assert_same(np.asarray(engine.logits(list(TOKENS))), captured_logits(file))


def test_codes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, _ = _model("INT8", "outputs", True, False)
    del model.graph.initializer[-2].dims[:]
    model.graph.initializer[-2].dims.append(2)
    model.graph.initializer[-2].raw_data = bytes(8)
    with pytest.raises(CheckpointError, match=r"'scales' has 2 elements, a weight \[6, 32\] in blocks of 32 has 6"):
        OnnxSource(saved(model, tmp_path))
