"""Round one weight to codes: scales that cover it, scales fitted to what its inputs are, and the nearest codes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS
from llmc.formats.schemes import BLOCK, Scheme
from llmc.graph.code_numbers import weight_values
from llmc.ops.weight_codes import weight_codes, weight_scales, weight_zeros
from llmc.passes.parallel_map import one_thread, parallel_map, row_spans
from llmc.passes.quantization.file_backed import file_backed
from llmc.passes.quantization.fit_blocks import fit_blocks

# Shares of the covering range that a fit tries. Source: the same grid as AutoGPTQ's and AWQ's clipping searches.
_SHRINKAGES = tuple(1.0 - i / 40 for i in range(1, 17))


@dataclass(frozen=True)
class RoundedWeight:
    """codes [rows, columns], scales and zeros [rows, groups], and what else there is, as in ops/weight_codes.py."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str
    scale_steps: Tensor | None = None
    minima: Tensor | None = None
    minimum_steps: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors, by the names of llmc::dequantize's arguments."""
        return {name: part for name in CODE_PARTS if (part := getattr(self, name)) is not None}

    def values(self) -> Tensor:
        """The numbers that the codes represent, in fp32."""
        more = (self.scale_steps, self.minima, self.minimum_steps)
        return weight_values(self.codes, self.scales, self.zeros, self.format, *more)

    def rows(self, span: slice) -> "RoundedWeight":
        """Return the rows of `span` as a weight, which shares memory with this one."""
        return self._with({name: part[span] for name, part in self.parts().items()})

    def in_file(self) -> "RoundedWeight":
        """This weight with its parts in files of the cache directory instead of memory."""
        return self._with({name: file_backed(part) for name, part in self.parts().items()})

    def put(self, span: slice, other: "RoundedWeight") -> None:
        """Overwrite the rows of `span` with the rows of `other`, a weight of the same form."""
        parts = other.parts()
        for name, part in self.parts().items():
            part[span] = parts[name]

    def _with(self, parts: dict[str, Tensor]) -> "RoundedWeight":
        """The same with these parts, of the same names."""
        return with_parts(parts.pop("codes"), parts, self.format)


def round_to_nearest(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> RoundedWeight:
    """Codes of a weight [rows, columns]. importance: [columns], weights of the error that scales are fitted to."""

    def rounded(span: slice) -> RoundedWeight:
        rows = weight[span].float()
        return _with_codes(rows, _parts_of(rows, scheme, importance), scheme.format)

    return _whole(rounded, scale_spans(weight, scheme), len(weight))


def nearest_values(rows: Tensor, scheme: Scheme) -> Tensor:
    """The values of rows [rows, columns], fp32, after `round_to_nearest`; rows share no scales."""
    if scheme.codes.is_blocked:
        return _with_codes(rows, _parts_of(rows, scheme, None), scheme.format).values()
    return _nearest_values(rows, *_scales_of(rows, scheme, None), scheme).flatten(1)


def with_parts(codes: Tensor, parts: Mapping[str, Tensor], format: str) -> RoundedWeight:
    """A weight of codes and its other parts, by name."""
    others = {"zeros": None, **parts}
    return RoundedWeight(codes, format=format, **others)  # type: ignore[arg-type]


def _with_codes(rows: Tensor, parts: Mapping[str, Tensor], format: str) -> RoundedWeight:
    more = (parts.get(name) for name in ("scale_steps", "minima", "minimum_steps"))
    codes = weight_codes(rows, parts["scales"], parts.get("zeros"), format, *more)
    return with_parts(codes, parts, format)


def _whole(rounded: Callable[[slice], RoundedWeight], spans: Sequence[slice], rows: int) -> RoundedWeight:
    """Round the spans of a weight, and join the results to tensors of all its rows."""
    with one_thread():
        first = rounded(spans[0])
    # Not joined in the end: small parts that stay, among what is freed, keep that from being used again, which took
    # eight times the bytes of the codes.
    sizes = {name: part.new_empty((rows, part.shape[1])) for name, part in first.parts().items()}
    whole = with_parts(sizes.pop("codes"), sizes, first.format)
    whole.put(spans[0], first)
    parallel_map(lambda span: whole.put(span, rounded(span)), spans[1:])
    return whole


def joined(parts: Sequence[RoundedWeight]) -> RoundedWeight:
    """The rows of one after those of the other."""
    together = _joined([part.parts() for part in parts])
    return with_parts(together.pop("codes"), together, parts[0].format)


def fitted_parts(weight: Tensor, scheme: Scheme, importance: Tensor) -> dict[str, Tensor]:
    """Return all parts except the codes, as `round_to_nearest` finds them, by name."""
    spans = scale_spans(weight, scheme)
    return _joined(parallel_map(lambda span: _parts_of(weight[span].float(), scheme, importance), spans))


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _parts_of(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> dict[str, Tensor]:
    """Return all parts of a weight's rows except codes: searched for blocked formats, otherwise scales and zeros."""
    codes, columns = scheme.codes, weight.shape[1]
    if codes.is_blocked:
        run = scheme.run_of(columns)
        assert run is not None, f"{scheme.name} was planned for columns that it divides"
        return fit_blocks(weight, codes, run, importance)
    scales, zeros = _scales_of(weight, scheme, importance)
    return {"scales": scales} if zeros is None else {"scales": scales, "zeros": zeros}


def _scales_of(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros of a weight's rows: covering, or of several shrunk ones those with the least weighted error."""
    width = scheme.columns or weight.shape[1]
    scales, zeros = _covering(weight, scheme, width)
    if importance is None or CODE_FORMATS[scheme.format].power_of_two or _shared_rows(weight, scheme) > 1:
        return scales, zeros
    best = _group_error(weight, scales, zeros, scheme, importance)
    # The extremes of a group bound all of its values.
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

    def squares(span: slice) -> tuple[float, float]:
        rows = weight[span].float()
        return float((rounded.rows(span).values() - rows).square().sum()), float(rows.square().sum())

    return relative_error(parallel_map(squares, scale_spans(weight, scheme)))


def relative_error(squares: Iterable[tuple[float, float]]) -> float:
    """Root mean square of the error over that of the exact values, from the sums of squares of each part."""
    wrong, right = (sum(terms) for terms in zip(*squares, strict=True))
    return (wrong / right) ** 0.5 if right > 0 else 0.0


def scale_spans(weight: Tensor, scheme: Scheme, least: int = 1) -> list[slice]:
    """Rows that are processed together, `least` or more of them: all where they share a scale, or have no numbers."""
    if scheme.granularity == "tensor" or weight.is_meta:
        return [slice(0, len(weight))]
    return row_spans(weight, least, BLOCK if scheme.granularity == "block" else 1)


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
    rounded = _nearest_values(weight, scales, zeros, scheme)
    lost = rounded.sub_(weight.view_as(rounded)).square_()
    return lost.mul_(importance.view(lost.shape[1:])).sum(-1)


def _nearest_values(weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """The numbers of the nearest codes, fp32 [rows, groups, columns of a group]."""
    format, groups = CODE_FORMATS[scheme.format], scales.shape[1]
    if format.integers is None:
        codes = weight_codes(weight, scales, zeros, scheme.format)
        return weight_values(codes, scales, zeros, scheme.format).view(len(weight), groups, -1)
    # The same in place and without codes: a fit does it seventeen times.
    scale = scales.float()[..., None]
    rounded = (weight.view(len(weight), groups, -1) / scale).round_()
    if zeros is None:
        rounded.clamp_(*format.symmetric)
    else:
        zero = zeros.float()[..., None]
        low, high = format.integers
        rounded.clamp_(low - zero, high - zero)
    return rounded.mul_(scale)
