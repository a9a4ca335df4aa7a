"""How many value channels the KV heads of each attention keep: one number for all, or a budget that layers share."""

import heapq
from collections.abc import Sequence

from torch import Tensor

from llmc.formats.pruning import Pruning


def value_ranks(pruning: Pruning, energies: Sequence[Tensor]) -> list[int]:
    """The channels that each KV head of each attention keeps.

    Args:
        pruning: `value_rank` for all attentions, or `values`, the share of all channels to remove.
        energies: [kv_heads, channels] of each attention, descending.
    """
    if pruning.value_rank:
        return [pruning.value_rank] * len(energies)
    ranks = [energy.shape[1] for energy in energies]
    left = pruning.values * sum(energy.numel() for energy in energies) + 1e-9
    shares = [energy.sum(0) / energy.sum().clamp_min(1e-300) for energy in energies]
    waiting = [_next(i, ranks[i], energy) for i, energy in enumerate(shares)]
    heapq.heapify(waiting)
    # The step that loses the smallest share of its layer's energy goes first; at least one step stays in each layer.
    while waiting:
        _, layer = heapq.heappop(waiting)
        step = _step(shares[layer])
        removed = step * energies[layer].shape[0]
        if removed > left:
            continue
        left -= removed
        ranks[layer] -= step
        if ranks[layer] > step:
            heapq.heappush(waiting, _next(layer, ranks[layer], shares[layer]))
    return ranks


def _step(shares: Tensor) -> int:
    """Channels that go at once: a sixteenth of a head, so that rows of the cache stay aligned."""
    return max(1, len(shares) // 16)


def _next(layer: int, rank: int, shares: Tensor) -> tuple[float, int]:
    """The share of its energy that a layer loses with its next step, and the layer's number."""
    return float(shares[rank - _step(shares) : rank].sum()), layer
