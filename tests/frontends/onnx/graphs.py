"""Small decoders written by hand with onnx.helper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH = 20, 8
Array = NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def decoder(
    nodes: Sequence[onnx.NodeProto] = (),
    tensors: dict[str, Array] | None = None,
    *,
    inputs: Sequence[onnx.ValueInfoProto] = (),
    result: str = "x",
    opset: int = 21,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """table[input_ids] is x [B, T, WIDTH]; `nodes` make `result` of it; its product with head are the logits."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", VOCABULARY])
    stored = {"table": random(VOCABULARY, WIDTH), "head": random(WIDTH, VOCABULARY), **(tensors or {})}
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["x"], name="lookup"),
            *nodes,
            helper.make_node("MatMul", [result, "head"], ["logits"], name="head_product"),
        ],
        "decoder",
        [ids, *inputs],
        [logits],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    opsets += [helper.make_opsetid(domain, 1) for domain in sorted({f.domain for f in functions})]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)


def saved(model: onnx.ModelProto, folder: Path, change: Callable[[onnx.ModelProto], None] | None = None) -> Path:
    """As model.onnx."""
    if change is not None:
        change(model)
    folder.mkdir(exist_ok=True)
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def mask(name: str = "attention_mask") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "total"])


def cache(name: str, heads: int, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", heads, "past", width])


def attention_layer(**attributes: Any) -> tuple[list[onnx.NodeProto], dict[str, Array], list[onnx.ValueInfoProto]]:
    """y, which is x and onnxruntime's GroupQueryAttention of it, as its builder writes it: 2 heads of 16, 1 KV head,
    with rotation."""
    heads, kv_heads, width = 2, 1, 16
    angles = np.arange(64)[:, None] * (0.5 ** np.arange(width // 2))[None]
    tensors = {
        "qkv": random(WIDTH, (heads + 2 * kv_heads) * width),
        "out": random(heads * width, WIDTH),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "one": np.asarray([1], np.int64),
        "axis": np.asarray(1, np.int64),
    }
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["count"], keepdims=0),
        helper.make_node("Sub", ["count", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "axis"], ["total"], axis=0),
        helper.make_node("Cast", ["total"], ["total32"], to=TensorProto.INT32),
        helper.make_node("MatMul", ["x", "qkv"], ["packed"]),
        helper.make_node(
            "GroupQueryAttention",
            ["packed", "", "", "past_key", "past_value", "seqlens", "total32", "cos", "sin"],
            ["attended", "present_key", "present_value"],
            name="attention",
            domain="com.microsoft",
            **{"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1, **attributes},
        ),
        helper.make_node("MatMul", ["attended", "out"], ["mixed"]),
        helper.make_node("Add", ["x", "mixed"], ["y"]),
    ]
    return nodes, tensors, [mask(), cache("past_key", kv_heads, width), cache("past_value", kv_heads, width)]
