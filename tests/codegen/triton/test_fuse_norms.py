"""Which norms lowering for a GPU joins with the products that read them, and why it leaves others alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from llmc.codegen.triton.fuse_norms import JoinedNorms, fuse_norms
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.codegen.triton.quantized_weight import quantized_weight

CHANNELS = 64


def start(dtype: torch.dtype = torch.float32) -> tuple[GraphBuilder, fx.Node]:
    """A graph up to the norm of an embedding."""
    b = GraphBuilder(dtype)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 32, CHANNELS))
    return b, b.call(ops.rms_norm.default, x, b.weight("norm", CHANNELS), 1e-5)


def coded(b: GraphBuilder, x: fx.Node, format: str, x_format: str) -> fx.Node:
    weight = quantized_weight(format, 16, CHANNELS, None)
    parts = (b.constant("codes", weight.codes), b.constant("scales", weight.scales), None, None, None)
    return b.call(ops.quantized_linear.default, x, *parts, None, "identity", 1.0, format, x_format)


def joined(b: GraphBuilder, result: fx.Node) -> JoinedNorms:
    found = fuse_norms(b.finish(result)[0])
    assert fuse_norms(found.graph).graph.graph.python_code("self").src == found.graph.graph.python_code("self").src
    return found


def targets(found: JoinedNorms) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in found.graph.graph.nodes if n.op == "call_function"]


def test_a_product_takes_in_the_norm_before_it() -> None:
    b, norm = start(torch.bfloat16)
    found = joined(b, b.call(ops.linear.default, norm, b.weight("w", 16, CHANNELS)))
    assert targets(found) == ["embedding", "norm_linear"] and not found.refusals
    b, norm = start()
    found = joined(b, b.call(ops.gated_linear.default, norm, b.weight("w", 16, CHANNELS), None, "silu"))
    assert targets(found) == ["embedding", "norm_gated_linear"]


@pytest.mark.parametrize("x_format", ["int8", "fp8"])
def test_a_product_that_rounds_its_rows_takes_in_the_norm_before_that(x_format: str) -> None:
    b, norm = start(torch.float16)
    found = joined(b, coded(b, norm, x_format, x_format))
    assert targets(found) == ["embedding", "norm_quantized_linear"] and not found.refusals


def refusal(found: JoinedNorms) -> str:
    assert "rms_norm" in targets(found)
    (only,) = found.refusals
    assert only.node.name == "rms_norm_default"
    return only.reason


def test_a_norm_with_two_readers_stays() -> None:
    b, norm = start()
    product = b.call(ops.linear.default, norm, b.weight("w", CHANNELS, CHANNELS))
    found = joined(b, b.call(torch.ops.aten.add.Tensor, product, norm))
    assert "its result has 2 readers: linear_default, add_tensor" in refusal(found)


def test_a_norm_of_heads_stays() -> None:
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 32, CHANNELS))
    heads = b.call(torch.ops.aten.view.default, x, [-1, 4, 16])
    norm = b.call(ops.rms_norm.default, heads, b.weight("norm", 16), 1e-5)
    found = joined(b, b.call(ops.linear.default, norm, b.weight("w", 8, 16)))
    assert "its rows have 2 axes" in refusal(found)


def test_a_norm_that_is_the_residual_too_stays() -> None:
    b, norm = start(torch.float16)
    weight = quantized_weight("int8", CHANNELS, CHANNELS, None)
    parts = (b.constant("codes", weight.codes), b.constant("scales", weight.scales), None, None, None)
    product = b.call(ops.quantized_linear.default, norm, *parts, norm, "identity", 1.0, "int8", "int8")
    assert "reads it as more than its x" in refusal(joined(b, product))


def test_fp16_rows_are_normed_before_a_product_that_would_multiply_them_unscaled() -> None:
    b, norm = start(torch.float16)
    found = joined(b, b.call(ops.linear.default, norm, b.weight("w", 16, CHANNELS)))
    assert "more than fp16 holds" in refusal(found)


def test_codes_are_too_few_bytes_to_read_a_norm_beside_them() -> None:
    b, norm = start()
    assert "256 bytes in fp32, beside rows of int4 codes" in refusal(joined(b, coded(b, norm, "int4", "none")))
