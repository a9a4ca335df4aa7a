"""Search scales, minima and their steps for blocked formats, the formats of GGUF files.

A scale that just covers a group wastes codes on its extremes, and rounding the scale to a step adds an error. The
search has two parts:

1. Per group, several ranges are tried. Each range gives codes, and weighted least squares give the best scale and
   minimum for these codes. The range with the smallest error wins.
2. Per run, the groups get common floats and integer steps. Each group tries the steps next to its own, with codes
   rounded again. Then least squares give the best floats for the run's codes and steps, and the groups try once more.

Source of the idea: the searches for k-quants in llama.cpp's ggml-quants.c (Kawrakow 2023).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.formats.code_format import CodeFormat, Steps

# Codes by which a tried range is wider than a group's own, or narrower. Three times the work would make the error 0.1%
# smaller.
_WIDER = (-1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8)
# Number of times that floats are fitted to steps, and steps to floats.
_ROUNDS = 1
_FLOATS = torch.bfloat16
# Replaces the scale of a group that has one value.
_LEAST = 1e-30


def fit_blocks(rows: Tensor, format: CodeFormat, run: int, importance: Tensor | None) -> dict[str, Tensor]:
    """Return all parts of a weight except its codes.

    Args:
        rows: The weight [rows, columns], fp32.
        format: A blocked format.
        run: Number of columns that share a float.
        importance: Factor of the squared errors of each column, [columns]; None weights all columns alike.

    Returns:
        The parts by the names of llmc::dequantize's arguments.
    """
    assert format.group is not None, "the format leaves its groups open"
    # Sums over the first axis are several times faster than sums over a short last one.
    values = rows.reshape(len(rows), -1, format.group).permute(2, 0, 1).contiguous()
    weights = torch.ones(rows.shape[1]) if importance is None else importance.float()
    weights = weights.reshape(-1, format.group).t().contiguous()[:, None]
    groups = _Groups(format, values, weights / weights.mean(0).clamp_min(_LEAST) + _LEAST)
    scale, minimum = _ranges(groups)
    if format.steps is not None:
        return _in_steps(groups, format.steps, scale, minimum, run // format.group)
    scales = _not_zero(scale, _LEAST).to(_FLOATS)
    if not format.has_minimum:
        return {"scales": scales}
    wide = scales.float()
    return {"scales": scales, "minima": groups.minimum(wide, groups.numbers(wide, minimum)).to(_FLOATS)}


class _Groups:
    """The groups of a weight's rows.

    Args:
        values: [columns of a group, rows, groups].
        weights: Factors of the squared errors, [columns of a group, 1, groups].
    """

    def __init__(self, format: CodeFormat, values: Tensor, weights: Tensor) -> None:
        self.format, self.values, self.weights = format, values, weights
        weighted = weights * values
        # Weighted sums of 1, of the values and of their squares, which do not depend on codes.
        self.one, self.x = weights.sum(0), weighted.sum(0)
        self._xx = weighted.mul_(values).sum(0)
        self._nearest = None if format.table is None else _nearest_of_table(format.table)

    def numbers(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The unscaled numbers of the codes nearest to the values."""
        scaled = (self.values + minimum if self.format.has_minimum else self.values) / scale
        if self._nearest is None:
            assert self.format.integers is not None
            return scaled.round_().clamp_(*self.format.integers)
        half = len(self._nearest) // 2
        places = scaled.mul_(2).floor_().clamp_(-half, half - 1).add_(half).int()
        # A third of the time of indexing with a tensor of three axes.
        return self._nearest.index_select(0, places.view(-1)).view(places.shape)

    def sums(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sums of q, q² and q·x for numbers q and values x, each [rows, groups]."""
        weighted = numbers * self.weights
        products = weighted * self.values
        return weighted.sum(0), numbers.mul(weighted).sum(0), products.sum(0)

    def minimum(self, scale: Tensor, numbers: Tensor) -> Tensor:
        """The best minimum for a scale and numbers."""
        return (scale * (numbers * self.weights).sum(0) - self.x) / self.one

    def fitted(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best scale and minimum for numbers, and the remaining error."""
        q, qq, qx = self.sums(numbers)
        alone = qx / qq.clamp_min(_LEAST)
        if not self.format.has_minimum:
            return alone, torch.zeros_like(alone), self._xx - alone * qx
        spread = self.one * qq - q * q
        is_spread = spread > 1e-6 * self.one * qq
        scale = torch.where(is_spread, (self.one * qx - q * self.x) / spread, alone)
        minimum = torch.where(is_spread, (q * qx - qq * self.x) / spread, 0.0)
        if self.format.steps is not None:  # Steps of minima are not negative.
            scale = torch.where(minimum < 0, alone, scale)
            minimum = minimum.clamp_min(0.0)
        minimum = torch.where(qq > 0, minimum, -self.x / self.one)
        scale = torch.where(scale > 0, scale, _LEAST)
        return scale, minimum, self._xx - scale * qx + minimum * self.x

    def error(self, numbers: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """The weighted squared error of each group."""
        left = numbers * scale - self.values
        if self.format.has_minimum:
            left -= minimum
        return left.square_().mul_(self.weights).sum(0)


def _nearest_of_table(table: tuple[float, ...]) -> Tensor:
    """The nearest number of a table of integers to x, indexed by floor(2·x) from the smallest index on."""
    levels = torch.tensor(table)
    # The middle of two integers is a multiple of one half.
    middles = (levels[1:] + levels[:-1]) / 2
    most = int(levels.abs().max()) + 1
    return levels[torch.bucketize(torch.arange(-2 * most, 2 * most) / 2 + 0.25, middles)]


def _ranges(groups: _Groups) -> tuple[Tensor, Tensor]:
    """The best scale and minimum of each group, [rows, groups], both any number."""
    best = torch.full(groups.values.shape[1:], torch.inf)
    scale, minimum = torch.ones_like(best), torch.zeros_like(best)
    for tried in _tried(groups.format, groups.values):
        new_scale, new_minimum, error = groups.fitted(groups.numbers(*tried))
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, new_scale, scale), torch.where(better, new_minimum, minimum)
    return scale, minimum


def _tried(format: CodeFormat, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The scales and minima of the tried ranges."""
    if format.has_minimum:
        assert format.integers is not None
        low, high = values.amin(0), values.amax(0)
        if format.steps is not None:
            low = low.clamp_max(0.0)
        for wider in _WIDER:
            yield (high - low).clamp_min(_LEAST) / (format.integers[1] + wider), -low
        return
    # The largest magnitude gets a code at an end of the range, whatever its sign: scales may be negative.
    peak = values.gather(0, values.abs().argmax(0, keepdim=True))[0]
    peak = torch.where(peak == 0, _LEAST, peak)
    ends, apart = _ends(format)
    for end in ends:
        for wider in _WIDER:
            yield peak / (end + (apart if end > 0 else -apart) * wider), peak


def _ends(format: CodeFormat) -> tuple[tuple[float, ...], float]:
    """The numbers that the largest magnitude may get, and half of their distance from the next number."""
    if format.table is not None:
        return (format.table[0], format.table[-1]), (format.table[-1] - format.table[0]) / 30
    assert format.integers is not None
    return format.integers[:1], 1.0


def _in_steps(groups: _Groups, steps: Steps, scale: Tensor, minimum: Tensor, of_run: int) -> dict[str, Tensor]:
    """Scales and minima as one float per run of groups and one step per group."""
    fit = _Steps(groups, steps, of_run)
    scales = fit.float_of(scale, fit.most)
    scale_steps = fit.in_range((scale / fit.each(scales)).round_())
    minima = fit.float_of(minimum, fit.most_of_minima)
    minimum_steps = (minimum / fit.each(minima)).round_().clamp_(0, fit.most_of_minima)
    scale_steps, minimum_steps = fit.next_steps(scales, scale_steps, minima, minimum_steps)
    for _ in range(_ROUNDS):
        scales, minima = fit.floats(scales, scale_steps, minima, minimum_steps)
        scale_steps, minimum_steps = fit.next_steps(scales, scale_steps, minima, minimum_steps)
    parts = {"scales": scales, "scale_steps": scale_steps.to(torch.int8)}
    if groups.format.has_minimum:
        parts |= {"minima": minima, "minimum_steps": minimum_steps.to(torch.int8)}
    return parts


@dataclass(frozen=True)
class _Steps:
    """Fits steps [rows, groups] and floats [rows, runs]; `of_run` groups share a float."""

    groups: _Groups
    steps: Steps
    of_run: int

    @property
    def most(self) -> int:
        """The largest step of a scale."""
        return self.steps.least + (1 << self.steps.bits) - 1

    @property
    def most_of_minima(self) -> int:
        return (1 << self.steps.bits) - 1

    def each(self, floats: Tensor) -> Tensor:
        """The float of each group, fp32."""
        return floats.float().repeat_interleave(self.of_run, -1)

    def run(self, values: Tensor) -> Tensor:
        """Values [rows, groups] as [rows, runs, of_run]."""
        return values.view(*values.shape[:-1], -1, self.of_run)

    def float_of(self, values: Tensor, most: int) -> Tensor:
        """The float with which the largest value of a run has the step `most`."""
        return _not_zero(self.run(values.abs()).amax(-1) / most, _LEAST).to(_FLOATS)

    def in_range(self, steps: Tensor) -> Tensor:
        """Steps clamped to their range, without 0: all codes of a group would have the same value."""
        return _not_zero(steps.clamp_(self.steps.least if self.steps.least < 0 else 1, self.most), 1.0)

    def next_steps(
        self, scales: Tensor, scale_steps: Tensor, minima: Tensor, minimum_steps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best of three neighbouring steps of each group, with the best step of its minimum."""
        groups, scale, minimum = self.groups, self.each(scales), self.each(minima)
        best, best_steps = None, (scale_steps, minimum_steps)
        for further in (-1, 0, 1):
            tried, less = self.in_range(scale_steps + further), minimum_steps
            numbers = groups.numbers(scale * tried, minimum * less)
            if groups.format.has_minimum:
                wanted = groups.minimum(scale * tried, numbers)
                less = (wanted / minimum).round_().clamp_(0, self.most_of_minima)
                numbers = groups.numbers(scale * tried, minimum * less)
            error = groups.error(numbers, scale * tried, minimum * less)
            if best is None:
                best, best_steps = error, (tried, less)
            better = error < best
            best = torch.where(better, error, best)
            best_steps = torch.where(better, tried, best_steps[0]), torch.where(better, less, best_steps[1])
        return best_steps

    def floats(
        self, scales: Tensor, scale_steps: Tensor, minima: Tensor, minimum_steps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best floats for each run's steps and codes. Floats that would not be positive keep their value."""
        groups = self.groups
        numbers = groups.numbers(self.each(scales) * scale_steps, self.each(minima) * minimum_steps)
        q, qq, qx = groups.sums(numbers)

        def of_run(tensor: Tensor) -> Tensor:
            return self.run(tensor).sum(-1)

        aa, ax = of_run(scale_steps.square() * qq), of_run(scale_steps * qx)
        if not groups.format.has_minimum:
            return _positive(ax / aa.clamp_min(_LEAST), scales), minima
        at = of_run(scale_steps * minimum_steps * q)
        tt, tx = of_run(minimum_steps.square() * groups.one), of_run(minimum_steps * groups.x)
        spread = aa * tt - at * at
        is_spread = spread > 1e-6 * aa * tt
        scales = _positive(torch.where(is_spread, (ax * tt - at * tx) / spread, 0.0), scales)
        return scales, _positive(torch.where(is_spread, (scales.float() * at - tx) / tt, 0.0), minima)


def _positive(floats: Tensor, otherwise: Tensor) -> Tensor:
    rounded = floats.to(_FLOATS)
    return torch.where(rounded > 0, rounded, otherwise)


def _not_zero(values: Tensor, otherwise: float) -> Tensor:
    return torch.where(values == 0, otherwise, values)
