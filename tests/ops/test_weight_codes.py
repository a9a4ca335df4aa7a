"""Codes of weights: what they stand for, and that rounding finds the nearest."""

from __future__ import annotations

import pytest
import torch

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.graph.code_numbers import weight_values
from llmc.ops.weight_codes import nearest_codes, weight_codes, weight_scales, weight_zeros

# The widest gap between two values of a format; of mxfp4, where magnitudes from 6 to 8 become 6, twice the overflow.
_STEP = {"int8": 1.0, "int4": 1.0, "nf4": 0.31, "mxfp4": 4.0, "fp8": 32.0}
_E2M1 = CODE_FORMATS["mxfp4"].table or ()


@pytest.mark.parametrize("spelled", ["int8", "int8:g32:asym", "int4:g32", "int4:g64:asym", "nf4", "mxfp4", "fp8:block"])
def test_values_are_within_half_a_step(spelled: str) -> None:
    scheme = parse_scheme(spelled)
    assert scheme is not None
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    rows = 128 if scheme.granularity == "block" else 1
    group = scheme.columns or 256
    scales = weight_scales(weight, scheme.format, group, scheme.symmetric, rows, torch.float32)
    zeros = None if scheme.symmetric else weight_zeros(weight, scales, scheme.format, rows)
    codes = weight_codes(weight, scales, zeros, scheme.format)
    error = (weight_values(codes, scales, zeros, scheme.format) - weight).abs()
    step = scales.repeat_interleave(256 // scales.shape[1], 1) * _STEP[scheme.format]
    assert bool((error <= step * 0.501 + (0.0 if scheme.symmetric else step * 0.5)).all())
    assert scales.shape == (130, 256 // group)


def test_nf4_and_e2m1_levels_are_their_own_nearest() -> None:
    levels = torch.tensor(CODE_FORMATS["nf4"].table)
    assert nearest_codes(levels, None, "nf4").tolist() == list(range(16))
    positive = torch.tensor(_E2M1[:8])
    assert nearest_codes(positive, None, "mxfp4").tolist() == list(range(8))
    assert nearest_codes(-positive[1:], None, "mxfp4").tolist() == list(range(9, 16))


def test_e2m1_ties_go_to_the_even_mantissa() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert [_E2M1[code] for code in nearest_codes(ties, None, "mxfp4").tolist()] == expected


def test_fp8_codes_are_torchs() -> None:
    values = torch.linspace(-500, 500, 777)
    codes = nearest_codes(values, None, "fp8")
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), values.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_a_group_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 64)
    for format in ("int8", "int4", "fp8", "nf4", "mxfp4"):
        scales = weight_scales(weight, format, 32, True, 1, torch.bfloat16)
        codes = weight_codes(weight, scales, None, format)
        assert torch.equal(weight_values(codes, scales, None, format), weight)


def test_symmetric_int8_never_uses_the_code_that_has_no_opposite() -> None:
    weight = torch.tensor([[-2.0, 1.0, 0.5, 2.0]])
    scales = weight_scales(weight, "int8", 4, True, 1, torch.float32)
    assert weight_codes(weight, scales, None, "int8").tolist() == [[-127, 64, 32, 127]]


def test_a_block_shares_its_scale_and_rows_repeat_it() -> None:
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(2))
    scales = weight_scales(weight, "fp8", 128, True, 128, torch.float32)
    assert torch.equal(scales[:128], scales[:1].expand(128, -1))
    assert float(scales[0, 0]) == pytest.approx(float(weight[:128, :128].abs().max()) / 448, rel=1e-6)
