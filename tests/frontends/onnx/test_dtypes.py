"""Graphs in half precision, which are built in another one where a target does not compute in theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import llmc.ops  # noqa: F401
from llmc.frontends.capture import capture
from llmc.frontends.open_model import open_model
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from tests.frontends.onnx.graphs import decoder, saved


def _halved(folder: Path) -> Path:
    """x·2 in fp16, by way of fp32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "wide"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT16),
    ]

    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            tensor.raw_data = np.frombuffer(tensor.raw_data, np.float32).astype(np.float16).tobytes()
            tensor.data_type = TensorProto.FLOAT16
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16

    return saved(decoder(nodes, result="y"), folder, change)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_graphs_half_becomes_the_dtype_asked_for(dtype: Any, tmp_path: Path) -> None:
    file = _halved(tmp_path)
    assert open_model(file).dtype is torch.float16
    graph = capture(file, BuildOptions(dtype=dtype)).graph
    wanted = getattr(torch, dtype)
    assert graph.info.dtype is wanted
    recipes = [graph.weights[node.name] for node in graph.weight_nodes()]
    assert all(isinstance(recipe, Stored) and recipe.dtype is wanted for recipe in recipes)
    assert graph.logits().meta["val"].dtype is wanted
