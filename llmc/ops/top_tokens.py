"""llmc::top_tokens — the likeliest tokens of each row of logits, and the logarithms of their probabilities."""

from typing import Any

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, op, per_element

# Maximum count of kernels, which keep their candidates in order.
MOST_TOKENS = 64


def _check(call: OpCall) -> str | None:
    count, most = call.arguments["count"], min(MOST_TOKENS, int(call.shape("logits")[-1]))
    return None if 1 <= count <= most else f"count is {count}; from 1 to {most} tokens can be found"


def _fake(a: Any) -> tuple[Tensor, Tensor]:
    shape = (*a.logits.shape[:-1], a.count)
    return a.logits.new_empty(shape, dtype=torch.int32), a.logits.new_empty(shape)


@op(fake=_fake, stages=FROM_SERVING, flops=per_element(1), rows=("logits",), check=_check)
def top_tokens(logits: Tensor, count: int, token_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(ids, logprobs): [..., count] each, int32 and fp32, the likeliest first, of equals the lower place first.

    logits: [..., vocabulary], fp32. token_map: [vocabulary], int32, the token at each place of a truncated vocabulary.
    """
    values, places = logits.sort(dim=-1, descending=True, stable=True)
    values, places = values[..., :count], places[..., :count]
    logprobs = values - torch.logsumexp(logits, -1, keepdim=True)
    return (places if token_map is None else token_map[places]).int(), logprobs.contiguous()
