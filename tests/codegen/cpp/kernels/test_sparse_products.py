"""Products and lookups of weights without their zeros have the bits of those with them, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.cpp.pack_sparse import pack_sparse, pack_sparse_codes, sparse_shape
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.runnable_targets import CODED, RUNNABLE
from tests.codegen.cpp.sparse_calls import both, call_sparse_embedding, with_zeros

targets = pytest.mark.parametrize("target", RUNNABLE)
coded_targets = pytest.mark.parametrize("target", CODED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
# tokens, in, out: ones, primes, the panel's and the tiles' edges, several blocks of k, several blocks of tokens.
SHAPES = [
    (1, 1, 1),
    (1, 2, 32),
    (2, 7, 31),
    (7, 33, 33),
    (14, 64, 64),
    (15, 65, 97),
    (17, 130, 40),
    (37, 131, 61),
    (5, 1543, 40),
    (64, 96, 288),
    (1031, 24, 35),
]


@targets
@dtypes
@pytest.mark.parametrize("kernel", ["linear", "gated_linear", "lm_head"])
def test_the_bits_are_those_of_the_dense_weight(target: CpuTarget, dtype: torch.dtype, kernel: str) -> None:
    torch.manual_seed(0)
    for tokens, channels, out in SHAPES:
        for zeros in (0.0, 0.5, 0.9, 1.0):
            weight = with_zeros(2 * out if kernel == "gated_linear" else out, channels, zeros, dtype)
            dense, sparse = both(target, kernel, torch.randn(tokens, channels).to(dtype), weight)
            assert torch.equal(dense, sparse), (tokens, channels, out, zeros)


@targets
def test_each_number_of_tokens_has_a_tile(target: CpuTarget) -> None:
    weight = with_zeros(64, 200, 0.5, torch.bfloat16)
    for tokens in range(1, 65):
        x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        dense, sparse = both(target, "linear", x, weight, threads=1)
        assert torch.equal(dense, sparse), tokens


@pytest.mark.slow
@coded_targets
@pytest.mark.parametrize("x_format", ["none", "int8"])
def test_each_number_of_tokens_has_a_tile_of_codes(target: CpuTarget, x_format: str) -> None:
    weight = with_zeros(64, 200, 0.5, torch.int8)
    scales = torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) / 100
    for tokens in range(1, 65):
        x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        dense, sparse = both(target, "linear", x, weight, scales=scales, x_format=x_format, threads=1)
        assert torch.equal(dense, sparse), tokens


@coded_targets
@dtypes
@pytest.mark.parametrize("x_format", ["none", "int8"])
@pytest.mark.parametrize("kernel", ["linear", "gated_linear", "lm_head"])
def test_codes_have_the_bits_of_dense_codes(target: CpuTarget, dtype: torch.dtype, x_format: str, kernel: str) -> None:
    torch.manual_seed(1)
    shapes = [(*shape, None) for shape in SHAPES] + [(9, 96, 40, 32), (17, 512, 33, 16), (3, 1024, 64, 512)]
    for tokens, channels, out, group in shapes:
        weight = with_zeros(2 * out if kernel == "gated_linear" else out, channels, 0.5, torch.int8)
        scales = torch.rand(len(weight), 1 if group is None else channels // group) / 100
        scales = scales if group is None else scales.bfloat16()
        x = torch.randn(tokens, channels).to(dtype)
        dense, sparse = both(target, kernel, x, weight, scales=scales, x_format=x_format)
        assert torch.equal(dense, sparse), (tokens, channels, out, group)


@targets
@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (70, 64), (97, 131)], ids=str)
def test_a_lookup_gives_rows(target: CpuTarget, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = with_zeros(*shape, 0.5, dtype)
    ids = torch.arange(shape[0], dtype=torch.int32).flip(0)
    assert torch.equal(call_sparse_embedding(target, ids, weight, dtype), weight.flip(0))
    codes, scales = with_zeros(*shape, 0.5, torch.int8), torch.rand(shape[0], 1)
    expected = (codes.float() * scales).to(dtype)
    assert torch.equal(call_sparse_embedding(target, ids, codes, dtype, scales), expected.flip(0))


@pytest.mark.parametrize("layout", [Layout.SPARSE_PANELS, Layout.GATED_SPARSE_PANELS])
def test_what_is_packed_is_masks_and_what_is_left(layout: Layout) -> None:
    weight = with_zeros(70, 33, 0.5, torch.bfloat16)
    packed = pack_sparse(weight, layout, torch.bfloat16)
    shape = sparse_shape((70, 33), layout, torch.bfloat16, None)
    count = int((weight != 0).sum())
    assert packed.numel() * 2 == shape.nbytes(count)
    assert shape.starts[2] == 8 * 4 + 8 * 3 * 17 and shape.nbytes(count) <= shape.starts[2] + 2 * count + 68
    masks, headers, values = shape.starts
    assert headers == values
    words = packed.view(torch.uint8)[masks:headers]
    assert sum(int(word).bit_count() for word in words) == count
    stored = packed.view(torch.uint8)[values : values + 2 * count].view(torch.bfloat16)
    assert torch.equal(stored.sort().values, weight[weight != 0].sort().values)


def test_packed_codes_have_their_scales() -> None:
    codes, scales = with_zeros(40, 64, 0.5, torch.int8), torch.rand(40, 2).bfloat16()
    packed = pack_sparse_codes(codes, scales, Layout.SPARSE_CODE_PANELS)
    shape = sparse_shape((40, 64), Layout.SPARSE_CODE_PANELS, torch.int8, scales)
    count = int((codes != 0).sum())
    assert len(packed) == shape.nbytes(count)
    stored = packed[shape.starts[2] : shape.starts[2] + count] ^ 128
    assert torch.equal(stored.view(torch.int8).sort().values, codes[codes != 0].sort().values)
