"""GPTQ: its factorization is the Hessian's, and its codes are better than the nearest on the calibration tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.errors import PassError
from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.formats.schemes import Scheme
from llmc.passes.quantization.column_sweep import gram, prepare
from llmc.passes.quantization.gptq import gptq
from llmc.passes.quantization.round_weight import round_to_nearest


def _scheme(text: str) -> Scheme:
    scheme = parse_scheme(text)
    assert scheme is not None
    return scheme


def _tokens(columns: int, *, dead: bool = False) -> Tensor:
    """Inputs with correlated channels of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns // 2, columns, generator=generator)
    sizes = torch.exp(torch.randn(columns, generator=generator))
    x = (
        torch.randn(600, columns // 2, generator=generator) @ mixing + torch.randn(600, columns, generator=generator)
    ) * sizes
    if dead:
        x[:, 5] = 0
    return x


@pytest.mark.parametrize("scheme", ["int4-gptq:g32", "int4-gptq:g32:noactorder"])
def test_factor_is_that_of_the_hessian(scheme: str) -> None:
    x = _tokens(1100)  # more than a strip of the Gram matrix
    hessian = gram(x.split(100), 1100)
    torch.testing.assert_close(hessian, x.t() @ x, rtol=1e-4, atol=1e-6 * float(hessian.max()))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(1100)
    solver = prepare(hessian.clone(), _scheme(scheme))
    ordered = damped[solver.order][:, solver.order].double()
    factor = solver.factor.double()
    assert torch.equal(factor, factor.triu())
    assert bool((factor.diagonal() == 1).all())
    inverse = torch.linalg.solve_triangular(factor, torch.eye(1100, dtype=torch.float64), upper=True)
    middle = inverse @ ordered @ inverse.t()
    sizes = middle.diagonal().rsqrt()
    scaled = middle * sizes[:, None] * sizes
    torch.testing.assert_close(scaled, torch.eye(1100, dtype=torch.float64), rtol=0, atol=5e-3)


def test_codes_are_those_of_the_published_update() -> None:
    """Frantar et al.'s algorithm 1, with the Cholesky factor of the inverse Hessian, a column at a time in fp64."""
    scheme = _scheme("int4-gptq:g32:noactorder")
    x, weight = _tokens(96), torch.randn(16, 96, generator=torch.Generator().manual_seed(2))
    hessian = gram([x], 96)
    solver = prepare(hessian.clone(), scheme)
    rounded = gptq(weight, solver, scheme)
    damped = hessian.double() + 0.01 * hessian.diagonal().mean() * torch.eye(96)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, scales = weight.double(), rounded.scales.double().repeat_interleave(32, 1)
    for k in range(96):
        codes = (left[:, k] / scales[:, k]).round().clamp(-8, 7)
        assert torch.equal(codes, rounded.codes[:, k].double())
        error = (left[:, k] - codes * scales[:, k]) / upper[k, k]
        left[:, k + 1 :] -= error[:, None] * upper[k, k + 1 :]


@pytest.mark.parametrize(
    "scheme",
    [
        *("int4-gptq:g32", "int4-gptq:g64:asym", "int4-gptq:channel:noactorder", "int8-gptq"),
        *("q4_k-gptq", "q4_1-gptq", "q6_k-gptq", "iq4_nl-gptq"),
    ],
)
def test_error_on_the_tokens_is_far_below_that_of_the_nearest_codes(scheme: str) -> None:
    x, weight = _tokens(128, dead=True), torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    rounded = gptq(weight, prepare(gram([x], 128), _scheme(scheme)), _scheme(scheme))
    plain = round_to_nearest(weight, _scheme(scheme))
    errors = [float((x @ (r.values() - weight).t()).square().sum()) for r in (rounded, plain)]
    assert errors[0] < errors[1] / 3
    smallest, largest = CODE_FORMATS[rounded.format].integers or (0, 15)
    assert int(rounded.codes.min()) >= smallest
    assert int(rounded.codes.max()) <= largest


def test_says_what_to_do_about_a_hessian_that_cannot_be_factored() -> None:
    spoiled = torch.eye(8)
    spoiled[0, 1] = spoiled[1, 0] = 5.0
    with pytest.raises(PassError, match="not positive definite"):
        prepare(spoiled, _scheme("int4-gptq:g32"))
