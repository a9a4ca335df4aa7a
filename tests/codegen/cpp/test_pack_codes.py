"""Code panels, taken apart byte by byte as kernels/api.h describes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.pack_codes import CodeShape, pack_codes
from llmc.errors import LoweringError
from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.frontends.gguf.block_types import BLOCK_TYPES
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
    group, k = divmod(column, shape.run)
    block = packed.view(-1, shape.runs, shape.run_nbytes)[panel, group]
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


@pytest.mark.parametrize("format", [name for name, format in CODE_FORMATS.items() if not format.is_blocked])
@pytest.mark.parametrize("gated", [False, True])
def test_every_element_is_where_the_interface_says(format: str, gated: bool) -> None:
    torch.manual_seed(0)
    for number, (out, channels, group) in enumerate([(38, 64, 16), (66, 13, None), (34, 96, 32)]):
        symmetric = format not in SHIFT or number != 2
        weight = quantized(out, channels, format, group=group, symmetric=symmetric, scale_dtype=tuple(SCALES)[number])
        layout = Layout.GATED_CODE_PANELS if gated else Layout.CODE_PANELS
        packed = pack_codes(weight.parts(), format, layout)
        shape = CodeShape((out, channels), weight.scales.shape[1], format, weight.scales.dtype, not symmetric)
        assert packed.nbytes == shape.nbytes(layout)
        for row in range(out):
            for column in range(0, channels, 5):
                g = column // weight.group
                zero = None if weight.zeros is None else int(weight.zeros[row, g])
                expected = (int(weight.codes[row, column]), float(weight.scales[row, g]), zero)
                assert unpacked(packed, row, column, shape, gated) == expected


def _parts(rows: int, columns: int, groups: int) -> dict[str, Tensor]:
    return {"codes": torch.zeros(rows, columns, dtype=torch.int8), "scales": torch.ones(rows, groups)}


def _taken_apart(packed: Tensor, row: int, shape: CodeShape) -> tuple[list[int], dict[str, list[float]]]:
    """Unsigned codes of a row of a blocked format, and its floats and steps, by name."""
    panel, lane = divmod(row, 32)
    block = packed.view(-1, shape.runs * shape.run_nbytes)[panel]
    headers = block[: shape.runs * shape.header_nbytes].view(shape.runs, -1, 32, 2)[:, :, lane]
    halves = headers.contiguous().view(torch.uint16).squeeze(-1).tolist()
    floats = 1 + shape.codes.has_minimum
    found: dict[str, list[float]] = {}
    for place, name in enumerate(("scales", "minima")[:floats]):
        bits = torch.tensor([run[place] for run in halves], dtype=torch.uint16)
        found[name] = bits.view(torch.float16).tolist()
    steps = shape.codes.steps
    for place, name in enumerate(("scale_steps", "minimum_steps")[:floats] if steps is not None else ()):
        assert steps is not None and shape.codes.group is not None
        of_run = shape.run // shape.codes.group
        strings = [sum(half << 16 * i for i, half in enumerate(run[floats:])) for run in halves]
        first, least = place * of_run, steps.least if place == 0 else 0
        fields = range(first, first + of_run)
        found[name] = [(s >> steps.bits * i & (1 << steps.bits) - 1) + least for s in strings for i in fields]
    words = block[shape.runs * shape.header_nbytes :].view(-1, 32, 4)[:, lane]
    codes = []
    for k in range(shape.shape[1]):
        unit, i, code, above = words[k // 32 * shape.codes.bits :], k % 32, 0, 0
        for plane in shape.codes.planes:
            place = i // 4 * plane
            code |= (int(unit[place // 8, i % 4]) >> place % 8 & (1 << plane) - 1) << above
            unit, above = unit[plane:], above + plane
        codes.append(code)
    return codes, found


@pytest.mark.parametrize("columns", [512, 576])
@pytest.mark.parametrize("format", [name for name, format in CODE_FORMATS.items() if format.is_blocked])
def test_blocked_formats_are_stored_bit_by_bit(format: str, columns: int) -> None:
    """Every code, scale, minimum and step, in as many bytes as a GGUF file takes for them."""
    torch.manual_seed(0)
    weight = quantized(64, columns, format, scale_dtype=torch.float16)
    packed = weight.packed()
    shape = CodeShape((64, columns), weight.scales.shape[1], format, torch.float16, has_zeros=False)
    blocks = next(kind for kind in BLOCK_TYPES.values() if kind.codes == format)
    if columns % blocks.elements == 0:
        assert packed.nbytes == 64 * columns // blocks.elements * blocks.nbytes
    for row in (0, 1, 31, 32, 63):
        codes, parts = _taken_apart(packed, row, shape)
        assert codes == (weight.codes[row].int() + shape.codes.unsigned_shift).tolist()
        assert parts == {name: part[row].tolist() for name, part in weight.parts().items() if name != "codes"}


@pytest.mark.parametrize("layout", [Layout.CODE_PANELS, Layout.GATED_CODE_PANELS])
@pytest.mark.parametrize("columns", [512, 576, 896])
@pytest.mark.parametrize("format", [name for name, format in CODE_FORMATS.items() if format.is_blocked])
def test_padding_takes_at_most_one_percent(format: str, columns: int, layout: Layout) -> None:
    """Of the bits that the scheme promises, with rows that do not fill the last panel."""
    rows, scheme = 4846, parse_scheme(format)
    assert scheme is not None and rows % 32
    run = CODE_FORMATS[format].run_of(columns)
    assert run is not None
    shape = CodeShape((rows, columns), columns // run, format, torch.float16, has_zeros=False)
    promised = rows * columns * scheme.bits(columns) / 8
    assert promised <= shape.nbytes(layout) <= 1.01 * promised


def test_a_wide_weight_has_the_size_that_its_shape_says() -> None:
    weight = quantized(1054, 576, "q5_k", scale_dtype=torch.float16)
    shape = CodeShape((1054, 576), weight.scales.shape[1], "q5_k", torch.float16, has_zeros=False)
    for layout in (Layout.CODE_PANELS, Layout.GATED_CODE_PANELS):
        assert pack_codes(weight.parts(), "q5_k", layout).nbytes == shape.nbytes(layout)


def test_rows_that_are_not_there_have_scale_zero() -> None:
    weight = quantized(33, 32, "int4", group=16)
    scales = weight.packed().view(2, 2, -1)[:, :, :64].view(torch.bfloat16)
    assert (scales[1, :, 1:] == 0).all() and (scales[0] != 0).all()


def test_columns_that_do_not_fall_into_groups_are_refused() -> None:
    with pytest.raises(LoweringError, match="50 columns cannot be cut into 3 equal groups"):
        pack_codes(_parts(4, 50, 3), "int4", Layout.CODE_PANELS)


def test_gated_weights_need_an_even_number_of_rows() -> None:
    with pytest.raises(LoweringError, match="an odd number of rows, 3"):
        pack_codes(_parts(3, 16, 1), "int8", Layout.GATED_CODE_PANELS)


def test_panels_are_packed_alike_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantized(200, 64, "int4", group=32, symmetric=False)
    at_once = pack_codes(weight.parts(), "int4", Layout.CODE_PANELS)
    for count in (1, 2, 3):
        monkeypatch.setattr("llmc.codegen.cpp.pack_codes._PANELS_AT_A_TIME", count)
        assert torch.equal(pack_codes(weight.parts(), "int4", Layout.CODE_PANELS), at_once)
