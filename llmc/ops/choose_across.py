"""llmc::choose_across: choose a token from each row of logits that is split over ranks, without gathering the row."""

from typing import Any

import torch
from torch import Tensor

from llmc.ops.collectives import alone, joined
from llmc.ops.registry import IN_NO_GRAPH, op, per_element
from llmc.ops.sampling import argmax_rows, draw_rows


def _token_and_score(a: Any) -> tuple[Tensor, Tensor]:
    return a.x.new_empty((a.x.shape[0],), dtype=torch.int32), a.x.new_empty((a.x.shape[0],))


def _choose(
    xs: list[Tensor], ends: Tensor, temperature: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    logits = joined(xs, ends, int(ends[-1]))
    likeliest, scores = argmax_rows(logits)
    draws = (temperature > 0) & scores.isfinite()
    drawn, _ = draw_rows(logits, temperature, seeds, counters)
    return torch.where(draws, drawn, likeliest), scores


@op(
    fake=_token_and_score,
    stages=IN_NO_GRAPH,
    flops=per_element(1),
    rows=("x", "temperature", "seeds", "counters"),
    across=_choose,
)
def choose_across(
    x: Tensor, ends: Tensor, temperature: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """(tokens, scores): [rows], int32 and fp32, the same on every rank.

    x: [rows, width], a rank's channels of the logits; ends: [ranks], int32, the argument of all_gather. Temperature 0
    takes the likeliest, the lowest of equals; others draw as draw_rows does of the whole row, with noise of the tokens'
    ids. The score is the row's largest logit, which is finite for usable logits.

    A rank does not need the logits of others. It offers the likeliest token of its own part, and, once all know the
    largest logit of the row, the token with the largest sum of logit and noise. The largest of these is that of the
    whole row.
    """
    raise alone("choose_across")
