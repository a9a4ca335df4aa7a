"""llmc::embedding — y[t] = weight[ids[t]]."""

from __future__ import annotations

from torch import Tensor

from llmc.ops.registry import op


def _fake(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@op("embedding(Tensor ids, Tensor weight) -> Tensor", fake=_fake)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of a table. ids: [tokens], integer; weight: [entries, channels]; returns [tokens, channels]."""
    return weight[ids]
