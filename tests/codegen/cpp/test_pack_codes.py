"""Code panels, taken apart byte by byte as kernels/api.h describes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.pack_codes import CodeShape, pack_codes
from llmc.errors import LoweringError
from llmc.formats.code_format import CODE_FORMATS
from llmc.program import Layout
from tests.codegen.cpp.quantized_calls import quantized

SHIFT = {"int8": 128, "int6": 32, "int5": 16, "int4": 8}


def unpacked(packed: Tensor, row: int, column: int, shape: CodeShape, gated: bool) -> tuple[int, float, int | None]:
    """(code, scale, zero) of one element."""
    if gated:
        half = shape.shape[0] // 2
        part, row = divmod(row, half)
        panel, lane = row // 16, row % 16 + 16 * part
    else:
        panel, lane = divmod(row, 32)
    group, k = divmod(column, shape.group)
    block = packed.view(-1, shape.groups, shape.group_nbytes)[panel, group]
    scales = block[: 32 * shape.scale_dtype.itemsize].view(shape.scale_dtype)
    start, zero = scales.nbytes, None
    if shape.has_zeros:
        zero = int(block[start : start + 64].view(torch.int16)[lane]) - SHIFT[shape.format]
        start += 64
    words = block[start:].view(-1, 32, 4)
    bits = CODE_FORMATS[shape.format].bits
    if bits == 8:
        code = int(words[k // 4, lane, k % 4])
    elif bits == 4:
        code = int(words[k // 8, lane, k % 4]) >> (4 if k % 8 >= 4 else 0) & 15
    else:
        unit, i = words[k // 32 * bits :], k % 32
        code = int(unit[i // 8, lane, k % 4]) >> (4 if k % 8 >= 4 else 0) & 15
        place = i // 4 * (bits - 4)
        code |= (int(unit[4 + place // 8, lane, k % 4]) >> place % 8 & (1 << (bits - 4)) - 1) << 4
    return code - SHIFT.get(shape.format, 0), float(scales[lane]), zero


@pytest.mark.parametrize("format", CODE_FORMATS)
@pytest.mark.parametrize("gated", [False, True])
def test_every_element_is_where_the_interface_says(format: str, gated: bool) -> None:
    torch.manual_seed(0)
    for number, (out, channels, group) in enumerate([(38, 64, 16), (66, 13, None), (34, 96, 32)]):
        symmetric = format not in SHIFT or number != 2
        weight = quantized(out, channels, format, group=group, symmetric=symmetric, scale_dtype=tuple(SCALES)[number])
        layout = Layout.GATED_CODE_PANELS if gated else Layout.CODE_PANELS
        packed = pack_codes(weight.codes, weight.scales, weight.zeros, format, layout)
        shape = CodeShape((out, channels), weight.scales.shape[1], format, weight.scales.dtype, not symmetric)
        assert packed.nbytes == shape.nbytes(layout)
        for row in range(out):
            for column in range(0, channels, 5):
                g = column // weight.group
                zero = None if weight.zeros is None else int(weight.zeros[row, g])
                expected = (int(weight.codes[row, column]), float(weight.scales[row, g]), zero)
                assert unpacked(packed, row, column, shape, gated) == expected


def test_rows_that_are_not_there_have_scale_zero() -> None:
    weight = quantized(33, 32, "int4", group=16)
    scales = weight.packed().view(2, 2, -1)[:, :, :64].view(torch.bfloat16)
    assert (scales[1, :, 1:] == 0).all() and (scales[0] != 0).all()


def test_columns_that_do_not_fall_into_groups_are_refused() -> None:
    with pytest.raises(LoweringError, match="50 columns cannot be cut into 3 equal groups"):
        pack_codes(torch.zeros(4, 50, dtype=torch.int8), torch.ones(4, 3), None, "int4", Layout.CODE_PANELS)


def test_gated_weights_need_an_even_number_of_rows() -> None:
    with pytest.raises(LoweringError, match="3 rows: an odd number"):
        pack_codes(torch.zeros(3, 16, dtype=torch.int8), torch.ones(3, 1), None, "int8", Layout.GATED_CODE_PANELS)


def test_panels_are_packed_alike_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantized(200, 64, "int4", group=32, symmetric=False)
    arguments = (weight.codes, weight.scales, weight.zeros, "int4", Layout.CODE_PANELS)
    at_once = pack_codes(*arguments)
    for count in (1, 2, 3):
        monkeypatch.setattr("llmc.codegen.cpp.pack_codes._PANELS_AT_A_TIME", count)
        assert torch.equal(pack_codes(*arguments), at_once)
