"""Scales, minima and steps of GGUF's formats: in range, better than what covers a group, and as the record says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.formats.schemes import SCHEMES, Scheme
from llmc.graph.code_numbers import code_numbers
from llmc.passes.quantization.round_weight import RoundedWeight, round_to_nearest

BLOCKED = [name for name, format in CODE_FORMATS.items() if format.is_blocked]


def _weight(rows: int, columns: int) -> Tensor:
    """Of rows and groups of very different sizes, with a few outliers."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(rows, columns // 32, generator=generator)).repeat_interleave(32, 1)
    weight = torch.randn(rows, columns, generator=generator) * sizes * 0.01
    weight[torch.rand(rows, columns, generator=generator) < 0.01] *= 5
    return weight


def _scheme(text: str) -> Scheme:
    scheme = parse_scheme(text)
    assert scheme is not None
    return scheme


def _error(weight: Tensor, scheme: str, importance: Tensor | None = None, *, judged_by: Tensor | None = None) -> float:
    lost = (round_to_nearest(weight, _scheme(scheme), importance).values() - weight).square()
    return float((lost if judged_by is None else lost * judged_by).sum() ** 0.5 / weight.square().sum() ** 0.5)


@pytest.mark.parametrize(
    ("searched", "covering", "share"),
    [
        ("q4_k", "int4:g32", 0.75),
        ("q4_1", "int4:g32:asym", 0.95),
        ("iq4_nl", "int4:g32", 0.85),
        ("q5_k", "int5:g32:asym", 0.95),
        ("q6_k", "int6:g32", 0.8),
        ("q3_k", "int4:g32", 2.0),
    ],
)
def test_the_search_loses_less_than_scales_that_cover(searched: str, covering: str, share: float) -> None:
    """Than codes of as many bits, or more, to the nearest."""
    weight = _weight(24, 768)
    assert _error(weight, searched) < share * _error(weight, covering)


@pytest.mark.parametrize("format", BLOCKED)
def test_the_search_follows_what_is_important(format: str) -> None:
    weight = _weight(24, 512)
    importance = torch.exp(2 * torch.randn(512, generator=torch.Generator().manual_seed(1)))
    fitted, plain = (_error(weight, format, weighting, judged_by=importance) for weighting in (importance, None))
    assert fitted < 0.97 * plain
    assert _error(weight, format) < _error(weight, format, importance)


@pytest.mark.parametrize("columns", [576, 512, 896, 640, 96])
@pytest.mark.parametrize("format", BLOCKED)
def test_parts_are_in_the_record_and_say_what_it_defines(format: str, columns: int) -> None:
    weight = _weight(6, columns)
    weight[1], weight[2] = 0.0, -0.25  # rows of one value
    weight[3, :32] *= 1e4  # and one whose other groups are next to nothing beside the first
    scheme, record = SCHEMES[format], CODE_FORMATS[format]
    rounded = round_to_nearest(weight, scheme)
    run, group = scheme.run_of(columns), record.group
    assert run is not None and group is not None and columns % run == 0
    assert run == (record.run if columns % (record.run or 0) == 0 else run)
    low, high = record.integers or (0, 15)
    assert low <= int(rounded.codes.min()) and int(rounded.codes.max()) <= high
    assert rounded.scales.shape == (6, columns // run) and bool(rounded.scales.isfinite().all())
    assert (rounded.minima is not None) == record.has_minimum
    assert (rounded.scale_steps is not None) == (record.steps is not None)
    if record.steps is not None:
        assert rounded.scale_steps is not None and rounded.scale_steps.shape == (6, columns // group)
        most = record.steps.least + (1 << record.steps.bits) - 1
        assert record.steps.least <= int(rounded.scale_steps.min()) and int(rounded.scale_steps.max()) <= most
        assert bool((rounded.scale_steps != 0).all())
        assert rounded.minimum_steps is None or int(rounded.minimum_steps.min()) >= 0
        assert rounded.minimum_steps is None or int(rounded.minimum_steps.max()) < 1 << record.steps.bits
    _check_values(rounded, run, group)
    torch.testing.assert_close(rounded.values()[1], weight[1])
    torch.testing.assert_close(rounded.values()[2], weight[2], rtol=0.02, atol=0)


def _check_values(found: RoundedWeight, run: int, group: int) -> None:
    """Of some elements, by the record's definition: number(code) · scale · step - minimum · step."""
    values, numbers = found.values(), code_numbers(found.codes, found.format)
    rows, columns = found.codes.shape
    for row in range(rows):
        for k in range(0, columns, 37):
            scale = float(found.scales[row, k // run])
            scale *= 1 if found.scale_steps is None else int(found.scale_steps[row, k // group])
            minimum = 0.0 if found.minima is None else float(found.minima[row, k // run])
            minimum *= 1 if found.minimum_steps is None else int(found.minimum_steps[row, k // group])
            expected = float(numbers[row, k]) * scale - minimum
            assert float(values[row, k]) == pytest.approx(expected, rel=1e-6, abs=1e-6 * abs(minimum))


@pytest.mark.parametrize("format", BLOCKED)
def test_codes_are_the_nearest_to_the_parts(format: str) -> None:
    weight = _weight(4, 256)
    rounded = round_to_nearest(weight, SCHEMES[format])
    left = (rounded.values() - weight).abs()
    low, high = CODE_FORMATS[format].integers or (0, 15)
    for step in (-1, 1):
        moved = (rounded.codes.int() + step).clamp(low, high).to(rounded.codes.dtype)
        other = RoundedWeight(**{**vars(rounded), "codes": moved}).values()
        assert bool((left <= (other - weight).abs() * (1 + 1e-5)).all())


def test_magnitudes_beyond_fp16_are_no_matter() -> None:
    weight = _weight(4, 256)
    errors = [_error(weight * size, "q4_k") for size in (1.0, 1e-12, 1e12)]
    assert max(errors) < 1.05 * min(errors)
