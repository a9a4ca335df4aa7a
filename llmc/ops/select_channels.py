"""llmc::select_channels — y[t, c] = x[t, order[c]], for weights whose columns are stored in another order."""

from __future__ import annotations

from torch import Tensor

from llmc.ops.registry import op


def _fake(x: Tensor, order: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], order.shape[0]))


@op("select_channels(Tensor x, Tensor order) -> Tensor", fake=_fake)
def select_channels(x: Tensor, order: Tensor) -> Tensor:
    """x: [tokens, channels]; order: [selected], int32; returns [tokens, selected]."""
    return x[..., order.long()]
