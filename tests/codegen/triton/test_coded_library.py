"""When the library multiplies codes: on which targets, for which weights and how many tokens, and what it costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from llmc.codegen.triton.kernels.products.coded_library import library_obstacle, library_tilings, sums_dtype
from llmc.codegen.triton.kernels.products.coded_product import coded_product
from llmc.codegen.triton.kernels.products.dense_ways import predicted_seconds, tilings
from llmc.codegen.triton.kernels.products.linear import fused_linear
from llmc.codegen.triton.kernels.products.product import Epilogue, Product
from llmc.codegen.triton.kernels.products.product_way import Way
from tests.codegen.triton.claimed import rounded
from tests.codegen.triton.quantized_weight import quantized_weight
from tests.codegen.triton.tensor_call import TensorCall
from tests.gpu_target import gpu_target


def product_of(
    format: str,
    x_format: str,
    *,
    outputs: int = 64,
    channels: int = 256,
    group: int | None = None,
    x_group: int | None = None,
    has_zeros: bool = False,
    in_fp32: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Product:
    weight = quantized_weight(format, outputs, channels, group, asymmetric=has_zeros)
    x = torch.zeros(2, channels, dtype=dtype)
    arguments: tuple[Any, ...] = (rounded(x, x_format, None, x_group), weight.claimed(), None, None, "identity", 1.0)
    call = TensorCall(fused_linear, (*arguments, dtype), (torch.zeros(2, outputs, dtype=dtype),), "cpu", in_place=False)
    return coded_product(call, Epilogue(in_fp32=in_fp32))


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_codes_of_one_format_are_multiplied_by_the_library(format: str) -> None:
    product, h100 = product_of(format, format), gpu_target("h100")
    assert library_obstacle(product, h100) is None
    assert not library_tilings(product, h100, 16)
    (library,) = library_tilings(product, h100, 17)
    assert library in tilings(product, h100, 17)
    ours = [t for t in tilings(product, h100, 8192) if t.way is not Way.LIBRARY]
    assert ours and predicted_seconds(product, h100, library, 8192) > 0


@pytest.mark.parametrize(
    ("target", "given", "says"),
    [
        ("h100", {"format": "int4", "x_format": "int8", "group": 128}, "not int8 tokens by int4 weights"),
        ("h100", {"format": "fp8", "x_format": "none"}, "not none tokens by fp8 weights"),
        ("mi300x", {"format": "int8", "x_format": "int8"}, "mi300x .* has no library product of int8"),
        ("a100", {"format": "fp8", "x_format": "fp8"}, "a100 .* has no library product of fp8"),
        ("h100", {"format": "int8", "x_format": "int8", "group": 128}, "rows of the weight have 2 scales"),
        ("h100", {"format": "int8", "x_format": "int8", "x_group": 32}, "and tokens 8;"),
        ("h100", {"format": "fp8", "x_format": "fp8", "channels": 264}, "264 channels, .* not a multiple of 16"),
        ("h100", {"format": "fp8", "x_format": "fp8", "outputs": 60}, "60 rows, .* not a multiple of 16"),
        ("rtx4090", {"format": "int8", "x_format": "int8", "outputs": 16384}, "largest step take 0.54 GB of 2. GB"),
    ],
)
def test_the_library_does_not_multiply(target: str, given: dict[str, Any], says: str) -> None:
    found = library_obstacle(product_of(**given), gpu_target(target))
    assert found is not None and re.search(says, found), found


def test_sums_are_of_a_dtype_that_holds_them() -> None:
    assert sums_dtype(product_of("int8", "int8")) is torch.int32
    assert sums_dtype(product_of("fp8", "fp8")) is torch.bfloat16
    assert sums_dtype(product_of("fp8", "fp8", dtype=torch.float16)) is torch.float32
    assert sums_dtype(product_of("fp8", "fp8", in_fp32=True)) is torch.float32


def test_wider_sums_cost_more() -> None:
    """Nothing is rounded in them, but they are written and read."""
    h100 = gpu_target("h100")
    library = library_tilings(product_of("fp8", "fp8"), h100, 17)[0]
    narrow, wide = (
        predicted_seconds(product_of("fp8", "fp8", outputs=4096, in_fp32=is_wide), h100, library, 4096)
        for is_wide in (False, True)
    )
    assert wide > narrow
