"""Put quantized weights into code panels (kernels/api.h): 32 output rows' scales, zeros or minima, and codes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.codegen.cpp.pack import padded_rows
from llmc.codegen.cpp.panel import PANEL
from llmc.errors import LoweringError
from llmc.formats.code_format import CODE_FORMATS, CodeFormat
from llmc.program import Layout

# The layout in code panels that corresponds to a plain weight's panels.
_PLAIN = {Layout.CODE_PANELS: Layout.PANELS, Layout.GATED_CODE_PANELS: Layout.GATED_PANELS}
# Number of panels packed at a time, so that little memory is used besides the codes and the result.
_PANELS_AT_A_TIME = 64


@dataclass(frozen=True)
class CodeShape:
    """The sizes that determine a quantized weight's bytes. shape: [out, in]; runs: runs of columns that share a float
    scale."""

    shape: tuple[int, ...]
    runs: int
    format: str
    scale_dtype: torch.dtype
    has_zeros: bool

    @property
    def codes(self) -> CodeFormat:
        """The format's record."""
        return CODE_FORMATS[self.format]

    @property
    def run(self) -> int:
        """Columns that share a float scale: a group, or several that have steps."""
        return self.shape[1] // self.runs

    @property
    def words(self) -> int:
        """32-bit words of one row's codes of one run, the last one filled up."""
        # Planes hold whole units of 32 codes.
        bits = self.codes.bits
        return -(-self.run // 32) * bits if self.codes.in_planes else -(-self.run * bits // 32)

    @property
    def step_halves(self) -> int:
        """16-bit numbers that hold one row's steps of one run, of scales and of minima."""
        return self.codes.step_bits(self.run) // 16

    @property
    def header_nbytes(self) -> int:
        """Bytes of one run of one panel, codes aside."""
        floats = self.scale_dtype.itemsize * (1 + self.codes.has_minimum)
        return PANEL * (floats + 2 * self.has_zeros + 2 * self.step_halves)

    @property
    def run_nbytes(self) -> int:
        """Bytes of one run of one panel."""
        return self.header_nbytes + PANEL * 4 * self.words

    def nbytes(self, layout: Layout) -> int:
        """Bytes of `pack_codes`'s result. Raises LoweringError for a shape that the layout does not fit."""
        return padded_rows(self.shape, _PLAIN[layout]) // PANEL * self.runs * self.run_nbytes


def pack_codes(parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
    """The weight in CODE_PANELS or GATED_CODE_PANELS, uint8, 1-D.

    parts: codes [out, in], scales and what else the format has, as in llmc/ops/weight_codes.py;
    GATED_CODE_PANELS takes gate's rows followed by up's. Raises LoweringError for a shape that the layout does not fit.
    """
    codes, scales = parts["codes"], parts["scales"]
    shape = CodeShape(tuple(codes.shape), scales.shape[1], format, scales.dtype, "zeros" in parts)
    if shape.run * shape.runs != codes.shape[1]:
        raise LoweringError(f"{codes.shape[1]} columns cannot be cut into {shape.runs} equal groups")
    packed = torch.empty(shape.nbytes(layout), dtype=torch.uint8)
    panels = packed.view(-1, shape.runs * shape.run_nbytes)
    rows = panel_rows(codes.shape[0], layout, panels.shape[0])
    for first in range(0, panels.shape[0], _PANELS_AT_A_TIME):
        of_panels = rows[first : first + _PANELS_AT_A_TIME]
        to = panels[first : first + _PANELS_AT_A_TIME]
        headers = torch.cat([*_headers(of_panels, shape, parts)], dim=2)
        words = panel_codes(of_panels, shape, codes).view(torch.uint8).flatten(2)
        if shape.codes.is_blocked:
            # Codes of all runs together: they are read as if there were no runs.
            to[:, : shape.runs * shape.header_nbytes] = headers.flatten(1)
            to[:, shape.runs * shape.header_nbytes :] = words.flatten(1)
        else:
            by_run = to.view(len(to), shape.runs, -1)
            by_run[:, :, : shape.header_nbytes] = headers
            by_run[:, :, shape.header_nbytes :] = words
    return packed


def panel_rows(out: int, layout: Layout, panels: int) -> Tensor:
    """[panels, PANEL]: which row of the weight is whose lane; -1 for none."""
    parts = 1 if layout is Layout.CODE_PANELS else 2
    lanes, rows = PANEL // parts, out // parts
    of_part = torch.arange(panels * lanes).view(panels, lanes)
    return torch.cat([torch.where(of_part < rows, of_part + i * rows, -1) for i in range(parts)], dim=1)


def _headers(rows: Tensor, shape: CodeShape, parts: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The headers before the codes of each run: bytes [panels, runs, …], one part at a time."""
    for name in ("scales", "minima"):
        if name in parts:
            yield _lanes(_of_rows(parts[name], rows))
    if "zeros" in parts:
        yield _lanes(parts["zeros"][rows.clamp_min(0)].to(torch.int16) + shape.codes.unsigned_shift)
    steps = shape.codes.steps
    if steps is not None:
        fields = [parts[name] for name in ("scale_steps", "minimum_steps") if name in parts]
        values = [_of_rows(part, rows).unflatten(-1, (shape.runs, -1)).int() for part in fields]
        values[0] = values[0] - steps.least
        yield _lanes(_packed_fields(torch.cat(values, dim=-1), steps.bits))


def _of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """[panels, PANEL, …] of values [out, …]; zero for no row."""
    return torch.where(rows[..., None] >= 0, values[rows.clamp_min(0)], torch.zeros((), dtype=values.dtype))


def _lanes(values: Tensor) -> Tensor:
    """Bytes [panels, runs, …] of [panels, PANEL, runs, …], with the lanes last."""
    by_run = values.movedim(1, -1)
    return by_run.contiguous().view(torch.uint8).flatten(2)


def _packed_fields(fields: Tensor, bits: int) -> Tensor:
    """16-bit numbers [..., halves] of unsigned fields [..., count], the first in the lowest bits."""
    digits = ((fields[..., None] >> torch.arange(bits)) & 1).flatten(-2)
    digits = torch.nn.functional.pad(digits, (0, -digits.shape[-1] % 16))
    halves: Tensor = (digits.unflatten(-1, (-1, 16)) << torch.arange(16)).sum(-1)
    return halves.to(torch.int16)


def panel_codes(rows: Tensor, shape: CodeShape, codes: Tensor) -> Tensor:
    """Pack codes [out, in] into int32 words [panels, runs, words, PANEL].

    rows: row numbers [panels, PANEL]; a negative one stands for no row, and its codes are zero. Zeros also fill up the
    last word.
    """
    shift = CODE_FORMATS[shape.format].unsigned_shift
    unsigned = codes[rows.clamp_min(0).flatten()].view(torch.uint8) + shift  # wraps around as it should
    of_rows = unsigned.view(*rows.shape, shape.runs, shape.run)
    of_rows = torch.where(rows[..., None, None] >= 0, of_rows, torch.tensor(shift, dtype=torch.uint8))
    return _words(of_rows, shape).permute(0, 2, 3, 1).contiguous()


def _words(codes: Tensor, shape: CodeShape) -> Tensor:
    """[panels, PANEL, runs, words], int32, of unsigned codes [panels, PANEL, runs, run]."""
    bits, planes = shape.codes.bits, shape.codes.planes
    missing = shape.words * 32 // bits - shape.run
    codes = torch.nn.functional.pad(codes, (0, missing), value=shape.codes.unsigned_shift)
    # The words of codes: for each 32 codes, consecutive planes; without planes, whole words in order.
    units = codes.unflatten(-1, (-1, 32 if shape.codes.in_planes else 32 // bits))
    shifts = [sum(planes[:i]) for i in range(len(planes))]
    parts = [_plane(units >> shift, plane) for shift, plane in zip(shifts, planes, strict=True)]
    return torch.cat(parts, dim=-1).flatten(-2).contiguous().view(torch.int32)


def _plane(codes: Tensor, bits: int) -> Tensor:
    """Bytes of the low bits of codes [..., count]: in the i-th of four those of the codes i, i + 4 and so on, the first
    in the lowest."""
    if bits == 8:
        return codes
    fields = (codes & ((1 << bits) - 1)).unflatten(-1, (-1, 8 // bits, 4))
    plane: Tensor = (fields << torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]).sum(-2, dtype=torch.uint8)
    return plane.flatten(-2)
