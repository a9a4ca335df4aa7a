"""Which norms lowering for a GPU joins with the products that read them, and why it leaves others alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from llmc.codegen.claims import Claims, find_claims
from llmc.codegen.triton.backend import TritonBackend
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.codegen.triton.quantized_weight import quantized_weight
from tests.gpu_target import gpu_target

CHANNELS = 64


def start(dtype: torch.dtype = torch.float32) -> tuple[GraphBuilder, fx.Node]:
    """A graph up to the norm of an embedding."""
    b = GraphBuilder(dtype)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 32, CHANNELS))
    return b, b.call(ops.rms_norm.default, x, b.weight("norm", CHANNELS), 1e-5)


def coded(b: GraphBuilder, x: fx.Node, format: str, x_format: str, residual: fx.Node | None = None) -> fx.Node:
    weight = quantized_weight(format, CHANNELS if residual is not None else 16, CHANNELS, None)
    parts = (b.constant("codes", weight.codes), b.constant("scales", weight.scales), None)
    values = b.call(ops.dequantize.default, *parts, format, torch.float32)
    if x_format != "none":
        x = b.call(ops.round_tokens.default, x, None, x_format, torch.float32)
    return b.call(ops.fused_linear.default, x, values, None, residual, "identity", 1.0, b.dtype)


def claimed(b: GraphBuilder, result: fx.Node) -> Claims:
    return find_claims(b.finish(result)[0], TritonBackend(gpu_target("h100")))


def names(found: Claims) -> list[list[str]]:
    return [[node.name.removesuffix("_default") for node in found.unit(product)] for product in found.before]


def test_a_product_takes_in_the_norm_before_it() -> None:
    b, norm = start(torch.bfloat16)
    claims = claimed(b, b.call(ops.linear.default, norm, b.weight("w", 16, CHANNELS)))
    assert names(claims) == [["rms_norm", "linear"]] and not claims.refusals
    b, norm = start()
    claims = claimed(b, b.call(ops.gated_linear.default, norm, b.weight("w", 16, CHANNELS), None, "silu"))
    assert names(claims) == [["rms_norm", "gated_linear"]]


@pytest.mark.parametrize("x_format", ["int8", "fp8"])
def test_a_product_that_rounds_its_rows_takes_in_the_norm_before_that(x_format: str) -> None:
    b, norm = start(torch.float16)
    claims = claimed(b, coded(b, norm, x_format, x_format))
    assert names(claims) == [["rms_norm", "dequantize", "round_tokens", "fused_linear"]] and not claims.refusals


def refusal(found: Claims) -> str:
    assert all("rms_norm" not in unit for unit in names(found))
    (only,) = found.refusals
    assert only.node.name == "rms_norm_default"
    return only.reason


def test_a_norm_with_two_readers_stays() -> None:
    b, norm = start()
    product = b.call(ops.linear.default, norm, b.weight("w", CHANNELS, CHANNELS))
    claims = claimed(b, b.call(torch.ops.aten.add.Tensor, product, norm))
    assert "its result has 2 readers: linear_default, add_tensor" in refusal(claims)


def test_a_norm_of_heads_stays() -> None:
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 32, CHANNELS))
    heads = b.call(torch.ops.aten.view.default, x, [-1, 4, 16])
    norm = b.call(ops.rms_norm.default, heads, b.weight("norm", 16), 1e-5)
    claims = claimed(b, b.call(ops.linear.default, norm, b.weight("w", 8, 16)))
    assert "its rows have 2 axes" in refusal(claims)


def test_a_norm_that_is_the_residual_too_stays() -> None:
    b, norm = start(torch.float16)
    assert "reads it as more than its x" in refusal(claimed(b, coded(b, norm, "int8", "int8", residual=norm)))


def test_rounded_rows_that_two_products_read_are_normed_once() -> None:
    b, norm = start()
    x = b.call(ops.round_tokens.default, norm, None, "int8", torch.float32)
    first = coded(b, x, "int8", "none")
    second = b.call(ops.fused_linear.default, x, first.args[1], None, first, "identity", 1.0, b.dtype)
    claims = claimed(b, second)
    assert "its result has 2 readers: fused_linear_default, fused_linear_default_1" in refusal(claims)
    assert names(claims) == [["round_tokens", "dequantize", f"fused_linear{i}"] for i in ("", "_default_1")]


def test_fp16_rows_are_normed_before_a_product_that_would_multiply_them_unscaled() -> None:
    b, norm = start(torch.float16)
    claims = claimed(b, b.call(ops.linear.default, norm, b.weight("w", 16, CHANNELS)))
    assert "more than fp16 holds" in refusal(claims)


def test_codes_are_too_few_bytes_to_read_a_norm_beside_them() -> None:
    b, norm = start()
    assert "256 bytes in fp32, for few rows of int4 codes" in refusal(claimed(b, coded(b, norm, "int4", "none")))
