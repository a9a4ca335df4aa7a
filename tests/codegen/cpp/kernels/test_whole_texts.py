"""Kernels of models that read whole texts are their ops' references, with the same bits whoever the neighbours are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.kernel_library import Part
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS

_OPS = torch.ops.llmc


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attention(
    target: CpuTarget, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None, threads: int = 2
) -> Tensor:
    y = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    begin = starts(lengths)
    shape = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    values = {
        "tokens": q.shape[0],
        "requests": len(lengths),
        **dict(zip(("heads", "kv_heads", "head_dim", "value_dim"), shape, strict=True)),
        "block_size": 1,
        "q": rows(q),
        "k": rows(k),
        "v": rows(v),
        "query_starts": pointer(begin),
        "scale": 0.25,
        "window": window or 0,
        "y": rows(y),
    }
    scratch = kernels(target, Part.PLAIN).llmc_paged_attention_scratch(*shape)
    call(target, "ragged_attention", [q.dtype], values, threads=threads, scratch=scratch)
    return y


def operands(lengths: Sequence[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Parts of one product's result, as merged projections leave them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    whole = torch.randn(sum(lengths), (heads + 2 * kv_heads) * width, generator=generator).to(dtype)
    parts = whole.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    return tuple(part.unflatten(1, (-1, width)) for part in parts)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width", "window"),
    [
        ([1], 1, 1, 8, None),
        ([5, 1, 70, 64], 4, 4, 16, None),
        ([33, 200, 3], 6, 2, 24, 5),
        ([1100, 9], 2, 1, 32, None),
        ([130], 4, 1, 20, 1),
    ],
)
def test_attention_is_the_reference(
    target: CpuTarget, dtype: torch.dtype, lengths: list[int], heads: int, kv_heads: int, width: int, window: int | None
) -> None:
    q, k, v = operands(lengths, heads, kv_heads, width, dtype)
    y = attention(target, q, k, v, lengths, window)
    expected = _OPS.ragged_attention.default(q, k, v, starts(lengths), 0.25, window)
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype])
    begin = starts(lengths).tolist()
    for first, length in zip(begin, lengths, strict=False):
        span = slice(first, first + length)
        alone = attention(target, q[span], k[span], v[span], [length], window, threads=1)
        assert torch.equal(alone, y[span])


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("lengths", "texts"), [([1], [0]), ([4, 1, 300], [0, 1, 2]), ([7, 90, 2], [2, 0]), ([3], [])])
def test_pooling_is_the_reference(
    target: CpuTarget, dtype: torch.dtype, pooling: str, lengths: list[int], texts: list[int]
) -> None:
    x = torch.randn(sum(lengths), 201, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1:132]
    begin = starts(lengths)
    wanted = torch.tensor([int(begin[text + 1]) - 1 for text in texts], dtype=torch.int32)

    def pooled(x: Tensor, begin: Tensor, wanted: Tensor) -> Tensor:
        y = torch.empty(len(wanted), 131, dtype=dtype)
        values = {"requests": len(begin) - 1, "selected": len(wanted), "channels": 131, "x": rows(x), "y": rows(y)}
        values |= {"query_starts": pointer(begin), "rows": pointer(wanted), "is_mean": int(pooling == "mean")}
        call(target, "pool_rows", [dtype], values)
        return y

    y = pooled(x, begin, wanted)
    torch.testing.assert_close(
        y, _OPS.pool_rows.default(x, begin, wanted, pooling), rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype]
    )
    for row, text in zip(y, texts, strict=True):
        part = x[int(begin[text]) : int(begin[text + 1])]
        alone = pooled(part, starts([len(part)]), torch.tensor([len(part) - 1], dtype=torch.int32))
        assert torch.equal(alone[0], row)


@pytest.mark.parametrize("target", RUNNABLE)
def test_segments_are_the_reference(target: CpuTarget) -> None:
    lengths = [1, 9, 40]
    ids = torch.randint(0, 4, (50,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    begin, y = starts(lengths), torch.empty(50, dtype=torch.int32)
    values = {
        "tokens": 50,
        "requests": 3,
        "ids": pointer(ids),
        "query_starts": pointer(begin),
        "separator": 2,
        "count": 3,
    }
    call(target, "segments_of_texts", [], values | {"y": pointer(y)})
    assert torch.equal(y, _OPS.segments_of_texts.default(ids, begin, 2, 3)) and int(y.max()) == 2
