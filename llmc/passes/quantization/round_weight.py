"""Round one weight to codes: scales that cover it, scales fitted to what its inputs are, and the nearest codes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.schemes import BLOCK, Scheme
from llmc.ops.weight_codes import weight_codes, weight_scales, weight_values, weight_zeros

# Elements that are rounded at a time, so that the many fp32 intermediates of a fit stay in a core's cache.
_CHUNK = 1 << 16
# Shares of the covering range that a fit tries. Source: the same grid as AutoGPTQ's and AWQ's clipping searches.
_SHRINKAGES = tuple(1.0 - i / 40 for i in range(1, 17))


@dataclass(frozen=True)
class RoundedWeight:
    """codes [rows, columns], scales and zeros [rows, groups] as in ops/weight_codes.py."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str

    def values(self) -> Tensor:
        """What the codes stand for, fp32."""
        return weight_values(self.codes, self.scales, self.zeros, self.format)

    def rows(self, start: int, end: int) -> "RoundedWeight":
        """Some of them."""
        zeros = None if self.zeros is None else self.zeros[start:end]
        return RoundedWeight(self.codes[start:end], self.scales[start:end], zeros, self.format)


def round_to_nearest(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> RoundedWeight:
    """Codes of a weight [rows, columns]. importance: [columns], weights of the error that scales are fitted to."""
    whole: dict[str, Tensor] = {}
    start = 0
    with one_thread():
        for rows in row_chunks(weight, scheme):
            scales, zeros = _scales_of(rows, scheme, importance)
            parts = {"codes": weight_codes(rows, scales, zeros, scheme.format), "scales": scales, "zeros": zeros}
            for name, part in parts.items():
                if part is None:
                    continue
                # Not joined in the end: small parts that stay, among what is freed, keep that from being used again,
                # which took eight times the bytes of the codes.
                if name not in whole:
                    whole[name] = part.new_empty((len(weight), part.shape[1]))
                whole[name][start : start + len(rows)] = part
            start += len(rows)
    return RoundedWeight(whole["codes"], whole["scales"], whole.get("zeros"), scheme.format)


def fitted_scales(weight: Tensor, scheme: Scheme, importance: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros alone, as `round_to_nearest` finds them."""
    with one_thread():
        found = [_scales_of(rows, scheme, importance) for rows in row_chunks(weight, scheme)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scales for scales, _ in found]), torch.cat(zeros) if zeros else None


def _scales_of(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros of a weight's rows: covering, or of several shrunk ones those with the least weighted error."""
    width = scheme.columns or weight.shape[1]
    scales, zeros = _covering(weight, scheme, width)
    if importance is None or CODE_FORMATS[scheme.format].power_of_two or _shared_rows(weight, scheme) > 1:
        return scales, zeros
    best = _group_error(weight, scales, zeros, scheme, importance)
    # What covers a group's extremes covers the group.
    grouped = weight.view(len(weight), -1, width)
    extremes = torch.stack((grouped.amin(-1), grouped.amax(-1)), -1).flatten(1)
    for shrinkage in _SHRINKAGES:
        tried, zero = _covering(extremes * shrinkage, scheme, 2)
        error = _group_error(weight, tried, zero, scheme, importance)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried, scales)
        if zeros is not None and zero is not None:
            zeros = torch.where(better, zero, zeros)
    return scales, zeros


def rounding_error(weight: Tensor, rounded: RoundedWeight, scheme: Scheme) -> float:
    """Root mean square error over the root mean square of a weight [rows, columns]."""
    wrong = right = 0.0
    start = 0
    with one_thread():
        for rows in row_chunks(weight, scheme):
            values = rounded.rows(start, start + len(rows)).values()
            start += len(rows)
            wrong += float((values - rows).square().sum())
            right += float(rows.square().sum())
    return (wrong / right) ** 0.5 if right > 0 else 0.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Small operations one after the other: waking threads for each takes longer, and on a busy machine far longer."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def row_chunks(weight: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Rows in fp32, some at a time; all at once where they share a scale, or have no numbers."""
    step = max(1, _CHUNK // weight.shape[1])
    if scheme.granularity == "tensor" or weight.is_meta:
        step = weight.shape[0]
    elif scheme.granularity == "block":
        step = -(-step // BLOCK) * BLOCK
    for rows in weight.split(step):
        yield rows.float()


def _covering(weight: Tensor, scheme: Scheme, width: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros for groups of `width` columns."""
    # bf16 scales are as good as fp32 ones, since codes are chosen after the scale is rounded; fp32 costs little.
    dtype = torch.float32 if scheme.columns is None else torch.bfloat16
    shared = _shared_rows(weight, scheme)
    scales = weight_scales(weight, scheme.format, width, scheme.symmetric, shared, dtype)
    return scales, None if scheme.symmetric else weight_zeros(weight, scales, scheme.format, shared)


def _shared_rows(weight: Tensor, scheme: Scheme) -> int:
    return {"tensor": weight.shape[0], "block": BLOCK}.get(scheme.granularity, 1)


def _group_error(weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, importance: Tensor) -> Tensor:
    groups = scales.shape[1]
    format = CODE_FORMATS[scheme.format]
    if format.integers is None:
        codes = weight_codes(weight, scales, zeros, scheme.format)
        error = (weight_values(codes, scales, zeros, scheme.format) - weight).square_().mul_(importance)
        return error.reshape(len(weight), groups, -1).sum(-1)
    # The same in place and without codes: a fit does it seventeen times.
    grouped, scale = weight.view(len(weight), groups, -1), scales.float()[..., None]
    rounded = (grouped / scale).round_()
    if zeros is None:
        rounded.clamp_(*format.symmetric)
    else:
        zero = zeros.float()[..., None]
        low, high = format.integers
        rounded.clamp_(low - zero, high - zero)
    return rounded.mul_(scale).sub_(grouped).square_().mul_(importance.view(groups, -1)).sum(-1)
