"""Round experts' weights with methods that use inputs: each expert by the tokens that it was sent.

Statistics over all tokens say little about an expert's tokens, which the router selects. An expert without calibration
tokens is rounded to nearest, which the weight's record notes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.formats.schemes import Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.passes.quantization.column_sweep import gram, prepare
from llmc.passes.quantization.gptq import gptq
from llmc.passes.quantization.round_weight import RoundedWeight, joined, round_to_nearest
from llmc.passes.quantization.stream import Stream


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a weight that are one expert's, and x [tokens, columns] of those that it was sent."""

    start: int
    end: int
    x: Tensor


def expert_rows(stream: Stream, product: fx.Node, rows: int) -> Iterator[ExpertRows]:
    """The rows of each expert of an expert_linear whose weight has `rows` rows in total, from the stream's current
    values."""
    arguments = call_arguments(product)
    xs, indexes = (list(stream.parts(arguments[name])) for name in ("x", "index"))
    per_expert = rows // arguments["experts"]
    for expert in range(arguments["experts"]):
        sent = [_sent(x, index == expert) for x, index in zip(xs, indexes, strict=True)]
        yield ExpertRows(expert * per_expert, (expert + 1) * per_expert, torch.cat(sent))


def _sent(x: Tensor, chosen: Tensor) -> Tensor:
    """x: [tokens, columns], or [tokens, slots, columns]; chosen: [tokens, slots]."""
    return x[chosen] if x.dim() == 3 else x[chosen.any(1)]


def round_experts(
    weight: Tensor, scheme: Scheme, stream: Stream, product: fx.Node, kept: Tensor | None
) -> tuple[RoundedWeight, str | None]:
    """Codes of a weight [experts · out, columns], and what to say of experts without tokens. kept: see gptq."""
    parts: list[RoundedWeight] = []
    unseen = 0
    for rows in expert_rows(stream, product, len(weight)):
        own = weight[rows.start : rows.end]
        if len(rows.x) == 0:
            unseen += 1
            parts.append(round_to_nearest(own, scheme))
        elif scheme.method == "gptq":
            solver = prepare(gram([rows.x], weight.shape[1]), scheme)
            parts.append(gptq(own, solver, scheme, None if kept is None else kept[rows.start : rows.end]))
        else:
            parts.append(round_to_nearest(own, scheme, rows.x.float().square().mean(0)))
    return joined(parts), _unseen(unseen, len(parts))


def _unseen(unseen: int, experts: int) -> str | None:
    if unseen == 0:
        return None
    count = "1 expert" if unseen == 1 else f"{unseen} experts"
    return f"{count} of {experts} saw no calibration token: rounded to the nearest"
