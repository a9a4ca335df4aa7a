"""Ops over symbols compute what torch computes: evaluated at random numbers, each reference agrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from llmc.debug.prove.elementary import MEANINGS
from llmc.debug.prove.symbolic_tensor import NotOverSymbols, Pool, SymbolicTensor
from llmc.graph.pointwise import FUNCTIONS

aten, ops = torch.ops.aten, torch.ops.llmc
functional = torch.nn.functional


def _write(k: Tensor) -> Tensor:
    cache = k.new_zeros((2, 1, 2, 4))
    ops.kv_write.default(k, k, cache, cache.clone(), torch.tensor([3, 0], dtype=torch.int32))
    return cache


def _paged(k: Tensor) -> Tensor:
    def integers(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    cache = _write(k)
    return ops.paged_attention.default(  # type: ignore[no-any-return]
        k, cache, cache, integers(0, 2), integers(2), integers([1, 0]), 0.5, 1, 2.0
    )


CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: ops.rms_norm.default(x, w, 0.5), ((2, 4), (4,))),
    "layer_norm": (lambda x, w: ops.layer_norm.default(x, w, w, 0.5), ((2, 4), (4,))),
    "torch's layer_norm": (lambda x, w: functional.layer_norm(x, (4,), w, w, 0.5), ((2, 4), (4,))),
    "linear": (lambda x, w: functional.linear(x, w), ((2, 3), (4, 3))),
    "gated_linear": (lambda x, w: ops.gated_linear.default(x, w, None, "gelu_tanh"), ((2, 3), (4, 3))),
    "rope": (lambda x, c: ops.rope.default(x, c, c * 2, True), ((2, 1, 6), (2, 2))),
    "attention": (lambda q, k: ops.attention.default(q, k, k, 0.5, 2, 3.0), ((3, 2, 2), (3, 1, 2))),
    "sdpa": (lambda q, k: functional.scaled_dot_product_attention(q, k, k, is_causal=True), ((2, 3, 2), (2, 3, 2))),
    "paged_attention": (_paged, ((2, 1, 4),)),
    "kv_write": (_write, ((2, 1, 4),)),
    "copy": (lambda x, y: aten.copy.default(x, y), ((2, 3), (2, 1))),
    "deviation": (lambda x: x.std([-1], False, True), ((2, 4),)),
    "norms": (lambda x: torch.linalg.vector_norm(x, 2, [-1]) + torch.linalg.vector_norm(x, 1, [-1]), ((2, 4),)),
    "log_sigmoid": (lambda x: functional.logsigmoid(x), ((2, 4),)),
    "logsumexp": (lambda x: torch.logsumexp(x, [-1], True), ((2, 4),)),
    "between": (lambda x, y: torch.clamp(torch.clamp(x, y, y + 0.125), max=y), ((2, 4), (2, 1))),
    "scatter": (lambda x: x.scatter(1, torch.tensor([[2, 0], [1, 1]]), 0.5), ((2, 4),)),
    "variance": (lambda x: x.var(-1), ((2, 4),)),
    "batched product": (lambda x, y: x @ y, ((2, 3, 2), (2, 2, 3))),
    "views that are written": (lambda x: x.clone().t().add_(1.0).t().mul_(x), ((2, 3),)),
    "moves": (lambda x: torch.cat([x.flip(0)[:, ::2], x.repeat_interleave(2, 1).tril()[:, :2]], 1), ((3, 4),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_torch(name: str) -> None:
    body, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25 for shape in shapes]
    pool = Pool()
    with torch.no_grad():
        wanted = body(*(n.float() for n in numbers))
        seen = body(*(pool.symbols(f"x{i}", shape) for i, shape in enumerate(shapes)))
    assert isinstance(seen, SymbolicTensor)
    assert (seen.shape, seen.dtype) == (wanted.shape, wanted.dtype)
    at: dict[Any, float] = {}
    for i, operand in enumerate(numbers):
        at |= dict(zip(pool.elements(pool.symbols(f"x{i}", operand.shape)), operand.flatten().tolist(), strict=True))
    actual = torch.tensor([float(sympy.N(e.xreplace(at))) for e in pool.elements(seen)]).reshape(seen.shape)
    torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-5)


def test_every_elementary_function_has_a_meaning() -> None:
    assert MEANINGS.keys() == FUNCTIONS.keys()


def test_an_op_without_meaning_is_named() -> None:
    with pytest.raises(NotOverSymbols, match=r"aten\.cumsum\.default has no meaning over symbols"):
        torch.cumsum(Pool().symbols("x", (3,)), 0)
