"""Quantized activations: each token's channels rounded to codes with one scale, or one for each group of channels."""

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.code_numbers import code_numbers
from llmc.graph.op_record import Part
from llmc.ops.registry import FROM_CAPTURED, op, per_element
from llmc.ops.weight_codes import nearest_codes


def token_codes(x: Tensor, scale: Tensor | None, format: str, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes of x's shape and scales [tokens, groups], fp32; a code stands for code · scale.

    format: int8 (-127 … 127) or fp8 (uint8, bits of e4m3fn). scale: [1], fp32, static, found by calibration; None:
    scale = max |x[t]| / largest code, per `group` channels if there is a group, where the last group may be shorter. In
    fp32, code = nearest(x · (1 / scale)) with ties to even and saturation, where the dynamic 1 / scale is computed as
    largest / max |x[t]|; a row of zeros has scale 0 and codes 0. Codes cannot express NaN, so a NaN in a group makes
    its scale NaN, even if the scale is static.
    """
    if group is not None:
        return _codes_of_groups(x, format, group)
    values, largest = x.float(), CODE_FORMATS[format].largest
    magnitude = values.abs().amax(-1, keepdim=True)
    if scale is None:
        scales = magnitude / largest
        inverse = torch.where(magnitude > 0, largest / magnitude, torch.zeros_like(magnitude))
    else:
        scales = torch.where(magnitude.isnan(), magnitude, scale.float())
        inverse = 1.0 / scale.float()
    return nearest_codes(values * inverse, None, format), scales.contiguous()


def _codes_of_groups(x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor]:
    missing = -x.shape[-1] % group
    grouped = torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, group))
    codes, scales = token_codes(grouped, None, format)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scales.squeeze(-1)


def token_values(codes: Tensor, scales: Tensor, format: str, group: int | None = None) -> Tensor:
    """The numbers that codes represent, in fp32."""
    if group is not None:
        scales = scales.repeat_interleave(group, -1)[..., : codes.shape[-1]]
    return code_numbers(codes, format) * scales


@op(
    fake=lambda a: a.x.new_empty(a.x.shape, dtype=a.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=("x",),
    part=Part.ARRIVAL,
    axes="x[* c] -> [* c]",
)
def round_tokens(x: Tensor, scale: Tensor | None, format: str, dtype: torch.dtype, group: int | None = None) -> Tensor:
    """The numbers that the codes of x: [tokens, channels] represent, as in `token_codes`, rounded to dtype."""
    return token_values(*token_codes(x, scale, format, group), format, group).to(dtype)
