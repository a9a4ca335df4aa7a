"""llmc::select_rows — y[i] = x[rows[i]]: keeps only the tokens whose logits were asked for."""

from __future__ import annotations

from torch import Tensor

from llmc.ops.registry import op


def _fake(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@op("select_rows(Tensor x, Tensor rows) -> Tensor", fake=_fake)
def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows. x: [tokens, channels]; rows: [selected], int32; returns [selected, channels]."""
    return x[rows.long()]
