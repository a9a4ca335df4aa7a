"""Kernels of models that read whole texts are their ops' references, with the same bits whoever the neighbours are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.texts.pool_rows import pool_rows
from llmc.codegen.triton.kernels.texts.ragged_attention import ragged_attention
from llmc.codegen.triton.kernels.texts.segments_of_texts import segments_of_texts
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

ATTENDED = [
    ([1], 1, 1, 8, None, None),
    ([5, 1, 40], 4, 2, 16, None, None),
    ([33, 100, 3], 2, 1, 24, 5, None),
    ([130], 2, 2, 20, 1, None),
    ([9, 20], 2, 2, 64, None, 5.0),
]


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def run(template: KernelTemplate, device: str, expected: Tensor, *arguments: Any) -> Tensor:
    call = TensorCall(template, arguments, (expected,), device, in_place=False)
    call.run(call.candidates()[0])
    return call.results[0].cpu().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width", "window", "softcap"), quick_sample(ATTENDED, ATTENDED[1:2])
)
def test_attention(
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None,
    softcap: float | None,
) -> None:
    sizes = enumerate((heads, kv_heads, kv_heads))
    q, k, v = (seeded_normal(seed, sum(lengths), count, width).to(dtype) for seed, count in sizes)
    rest = (0.25, window, softcap)
    check(ragged_attention, q, k, v, starts(lengths), *rest, device=device, tolerance=GPU_KERNELS[dtype])
    whole = run(ragged_attention, device, q, q, k, v, starts(lengths), *rest)
    last = slice(sum(lengths) - lengths[-1], None)
    alone = run(ragged_attention, device, q[last], q[last], k[last], v[last], starts(lengths[-1:]), *rest)
    assert torch.equal(alone, whole[last])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("lengths", "texts"), [([1], [0]), ([4, 1, 30], [0, 1, 2]), ([7, 9, 2], [2, 0])])
def test_pooling(device: str, pooling: str, lengths: list[int], texts: list[int]) -> None:
    for dtype in (torch.float32, torch.float16):
        x, begin = seeded_normal(1, sum(lengths), 131).to(dtype), starts(lengths)
        wanted = torch.tensor([int(begin[text + 1]) - 1 for text in texts], dtype=torch.int32)
        check(pool_rows, x, begin, wanted, pooling, device=device, tolerance=GPU_KERNELS[dtype])
        whole = run(pool_rows, device, x[: len(texts)], x, begin, wanted, pooling)
        part = x[int(begin[texts[0]]) : int(begin[texts[0] + 1])]
        own = starts([len(part)])
        assert torch.equal(run(pool_rows, device, x[:1], part, own, own[1:] - 1, pooling)[0], whole[0])


def test_segments(device: str) -> None:
    """Of texts longer than a block, too."""
    ids = torch.randint(0, 4, (350,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    check(segments_of_texts, ids, starts([1, 9, 340]), 2, 3, device=device, tolerance=0.0)
