"""KV caches as codes: what is read is what was written, within the format's step."""

from __future__ import annotations

import pytest
import torch

from llmc.errors import OptionError
from llmc.formats.cache_format import parse_cache_format, parse_cache_formats
from llmc.ops.attention import attend
from llmc.ops.cache_codes import read_codes, write_codes

_STEPS = {"int8": 1 / 254, "int8:g32": 1 / 254, "int4": 1 / 30, "int4:head": 1 / 30, "fp8": 1 / 28}


@pytest.mark.parametrize("spelled", _STEPS)
def test_reads_what_was_written(spelled: str) -> None:
    format = parse_cache_format(spelled)
    values = torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(4, 2, 16, format.position_bytes(64), dtype=torch.uint8)
    slots = torch.tensor([3, 0, 20, 63, 31, 32, 47], dtype=torch.int32)
    write_codes(values, cache, slots, str(format))
    read = read_codes(cache, 64, str(format))[slots.long() // 16, :, slots.long() % 16]
    grouped = values.reshape(7, 2, format.groups(64), -1)
    spread = (grouped.amax(-1) - grouped.amin(-1)) if format.codes == "int4" else 2 * grouped.abs().amax(-1)
    allowed = spread.repeat_interleave(64 // format.groups(64), -1) * _STEPS[spelled]
    # bf16 scales and minima are 2⁻⁹ off, so that the ends of the range may be.
    assert bool(((read - values).abs() <= allowed * 1.2 + 0.01).all())


def test_positions_do_not_touch_each_other() -> None:
    cache = torch.zeros(1, 1, 8, parse_cache_format("int4").position_bytes(32), dtype=torch.uint8)
    first, second = torch.full((1, 1, 32), 3.0), torch.linspace(-1, 1, 32).reshape(1, 1, 32)
    write_codes(first, cache, torch.tensor([2]), "int4:g32")
    before = read_codes(cache, 32, "int4:g32")[0, 0, 2].clone()
    write_codes(second, cache, torch.tensor([3]), "int4:g32")
    assert torch.equal(read_codes(cache, 32, "int4:g32")[0, 0, 2], before)
    torch.testing.assert_close(before, first[0, 0], rtol=0.01, atol=0)


@pytest.mark.parametrize("spelled", _STEPS)
def test_codes_do_not_hide_a_nan(spelled: str) -> None:
    format = parse_cache_format(spelled)
    values, cache = torch.ones(2, 2, 64), torch.zeros(1, 2, 8, format.position_bytes(64), dtype=torch.uint8)
    values[0, 1, 3] = float("nan")
    write_codes(values, cache, torch.tensor([5, 6]), str(format))
    lost = read_codes(cache, 64, str(format)).isnan()
    expected = torch.zeros_like(lost)
    expected[0, 1, 5, : 64 // format.groups(64)] = True
    assert torch.equal(lost, expected)


@pytest.mark.parametrize(("spelled", "tolerance"), [("int8", 0.03), ("int8/int4", 0.25)])
def test_paged_attention_reads_codes(spelled: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(5, heads, 32, generator=generator) for heads in (2, 2, 4))
    formats = parse_cache_formats(spelled)
    widths = (formats.of(part).position_bytes(32) for part in "kv")
    k_cache, v_cache = (torch.zeros(2, 2, 8, width, dtype=torch.uint8) for width in widths)
    torch.ops.llmc.kv_write.default(k, v, k_cache, v_cache, torch.arange(8, 13, dtype=torch.int32), spelled)
    starts, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    table = torch.tensor([[1]], dtype=torch.int32)
    arguments = (q, k_cache, v_cache, starts, lengths, table, 0.2, None, None, None, spelled, 32)
    out = torch.ops.llmc.paged_attention.default(*arguments)
    torch.testing.assert_close(out, attend(q, k, v, 0, 0.2, None, None, None), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("spelled", "canonical"),
    [
        ("int4", "int4:g32"),
        ("int4:g32", "int4:g32"),
        ("int4:rotated", "int4:g32:rotated"),
        ("int4:head:rotated", "int4:head:rotated"),
        ("int8", "int8"),
        ("int8:rotated", "int8:rotated"),
        ("fp8:g16:rotated", "fp8:g16:rotated"),
    ],
)
def test_formats_have_one_spelling(spelled: str, canonical: str) -> None:
    format = parse_cache_format(spelled)
    assert str(format) == canonical
    assert parse_cache_format(canonical) == format
    assert not parse_cache_format(format.stored).rotated


@pytest.mark.parametrize(
    "bad", ["int3", "int8:g", "int8:g1", "int4:g32:g32", "int8:rotated:g32", "int8:rotated:rotated"]
)
def test_refuses_what_is_no_format(bad: str) -> None:
    with pytest.raises(OptionError):
        parse_cache_format(bad)


@pytest.mark.parametrize(
    ("spelled", "canonical", "stored"),
    [
        ("int8", "int8", "int8"),
        ("int8/int8", "int8", "int8"),
        ("int4:rotated", "int4:g32:rotated", "int4:g32"),
        ("int8/int4:rotated", "int8/int4:g32:rotated", "int8/int4:g32"),
        ("int8:g16/int4:head", "int8:g16/int4:head", "int8:g16/int4:head"),
    ],
)
def test_pairs_of_formats_have_one_spelling(spelled: str, canonical: str, stored: str) -> None:
    formats = parse_cache_formats(spelled)
    assert (str(formats), formats.stored) == (canonical, stored)
    assert parse_cache_formats(canonical) == formats
    assert formats.keys.rotated == formats.values.rotated == formats.rotated == spelled.endswith("rotated")


@pytest.mark.parametrize("bad", ["int8/", "/int8", "int8/int4/int4", "int8/int3", "int8:rotated/int4"])
def test_refuses_what_is_no_pair_of_formats(bad: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_cache_formats(bad)
    assert caught.value.fix
