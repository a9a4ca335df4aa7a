"""How much each input channel of some products is scaled, so that their rounding does less harm: AWQ and SmoothQuant.

Both multiply a channel's weights by s and divide the channel by s. AWQ gives channels with large inputs finer weights;
SmoothQuant takes part of the activations' range into the weights, so that outlier channels do not set every token's
scale.
Sources: Lin et al. 2024, "AWQ: activation-aware weight quantization for on-device LLM compression and acceleration";
Xiao et al. 2023, "SmoothQuant: accurate and efficient post-training quantization for large language models".
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmc.formats.schemes import Scheme
from llmc.passes.parallel_map import parallel_map
from llmc.passes.quantization.round_weight import nearest_values, scale_spans

_STEPS = 20
_LEAST = 1e-5

# Makes channels that must be scaled alike equal: takes their values and a reduction over dim 1.
Tie = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def smoothing_scales(xs: Sequence[Tensor], weights: Sequence[Tensor], alpha: float, tie: Tie) -> Tensor:
    """SmoothQuant's s[c] = max |x[c]|^α / max |w[:, c]|^(1-α). xs: [tokens, channels]; weights: [out, channels]."""
    largest_x, largest_w = (
        tie(torch.stack(parallel_map(lambda part: part.float().abs().amax(0), parts)).amax(0), _largest)
        for parts in (xs, weights)
    )
    scales = largest_x.clamp_min(_LEAST).pow(alpha) / largest_w.clamp_min(_LEAST).pow(1 - alpha)
    # A channel that is always 0 says nothing of how it should be scaled.
    return torch.where(largest_x > 0, scales, torch.ones_like(scales)).clamp(_LEAST, 1 / _LEAST)


def awq_scales(x: Tensor, weights: Sequence[Tensor], schemes: Sequence[Scheme], tie: Tie) -> tuple[Tensor, float]:
    """AWQ's s[c] = mean |x[c]|^r for the r in [0, 1) that makes the products' error least, and that error over the one
    of r = 0. x: [tokens, channels]; weights: [out, channels] with their schemes."""
    values = x.float()
    mean = tie(values.abs().mean(0), _mean).clamp_min(_LEAST)
    tried = [mean.pow(step / _STEPS) for step in range(_STEPS)]
    tried = [scales / (scales.max() * scales.min()).sqrt() for scales in tried]

    def error(scales: Tensor) -> float:
        return sum(_error(values, w, s, scales) for w, s in zip(weights, schemes, strict=True))

    errors = parallel_map(error, tried)
    least = min(errors)
    return tried[errors.index(least)], least / errors[0] if errors[0] > 0 else 1.0


def _error(x: Tensor, weight: Tensor, scheme: Scheme, scales: Tensor) -> float:
    """The squared rounding error in the products of a weight whose channels are scaled."""
    total = 0.0
    for span in scale_spans(weight, scheme):
        rows = weight[span].float()
        changed = nearest_values(rows * scales, scheme).div_(scales).sub_(rows)
        total += float((x @ changed.t()).square().sum())
    return total


def _largest(values: Tensor) -> Tensor:
    return values.amax(1, keepdim=True)


def _mean(values: Tensor) -> Tensor:
    return values.mean(1, keepdim=True)
