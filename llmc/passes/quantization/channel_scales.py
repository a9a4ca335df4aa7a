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
from llmc.passes.quantization.round_weight import round_to_nearest

_STEPS = 20
_LEAST = 1e-5

# Makes channels that must be scaled alike equal: takes their values and a reduction over dim 1.
Tie = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def smoothing_scales(x: Tensor, weights: Sequence[Tensor], alpha: float, tie: Tie) -> Tensor:
    """SmoothQuant's s[c] = max |x[c]|^α / max |w[:, c]|^(1-α). x: [tokens, channels]; weights: [out, channels]."""
    largest_x = tie(x.float().abs().amax(0), _largest)
    largest_w = tie(torch.stack([w.float().abs().amax(0) for w in weights]).amax(0), _largest)
    scales = largest_x.clamp_min(_LEAST).pow(alpha) / largest_w.clamp_min(_LEAST).pow(1 - alpha)
    # A channel that is always 0 says nothing of how it should be scaled.
    return torch.where(largest_x > 0, scales, torch.ones_like(scales)).clamp(_LEAST, 1 / _LEAST)


def awq_scales(x: Tensor, weights: Sequence[Tensor], schemes: Sequence[Scheme], tie: Tie) -> tuple[Tensor, float]:
    """AWQ's s[c] = mean |x[c]|^r for the r in [0, 1) that makes the products' error least, and that error over the one
    of r = 0. x: [tokens, channels]; weights: [out, channels] with their schemes."""
    values = x.float()
    mean = tie(values.abs().mean(0), _mean).clamp_min(_LEAST)
    whole = [weight.float() for weight in weights]
    best, least, plain = torch.ones_like(mean), float("inf"), 0.0
    for step in range(_STEPS):
        scales = mean.pow(step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(
            float((values @ (round_to_nearest(w * scales, s).values() / scales - w).t()).square().sum())
            for w, s in zip(whole, schemes, strict=True)
        )
        plain = error if step == 0 else plain
        if error < least:
            best, least = scales, error
    return best, least / plain if plain > 0 else 1.0


def _largest(values: Tensor) -> Tensor:
    return values.amax(1, keepdim=True)


def _mean(values: Tensor) -> Tensor:
    return values.mean(1, keepdim=True)
