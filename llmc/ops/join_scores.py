"""llmc::join_scores — the scores by which the heads of several layers choose a request's rows together.

    joined[h, r] = max(before[r], max over KV heads g of scores[g, r])     all heads of all layers
    joined[h, r] = before[h, r] + scores[h, r]                             one KV head of all layers
One call for each layer, where `before` is what the last call gave. Sums order rows as means over layers do.
Source: Mao et al. 2026, "TriAttention: Efficient long reasoning with trigonometric KV compression".
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, op, per_element


def _heads_fit(call: OpCall) -> str | None:
    longest, kv_heads = call.arguments["longest"], call.arguments["kv_heads"]
    own, before = call.shape("scores"), call.shape("before")
    across = call.arguments["across_heads"]
    if own[-1] % longest or (not across and own[-1] != kv_heads * longest):
        wanted = "rows" if across else f"{kv_heads} heads, one for each of the result,"
        return f"scores {own} are not those of {wanted} with {longest} numbers each"
    wanted_before = [1, (1 if across else kv_heads) * longest]
    return None if before in ([], wanted_before) else f"scores {before} of layers before are not {wanted_before}"


@op(
    fake=lambda a: a.scores.new_empty((1, a.kv_heads * a.longest)),
    stages=FROM_SERVING,
    flops=per_element(0),
    check=_heads_fit,
)
def join_scores(
    scores: Tensor, before: Tensor | None, compaction: Tensor, longest: int, kv_heads: int, across_heads: bool
) -> Tensor:
    """The joined scores of a request's rows until this layer: [1, kv_heads · longest], fp32, 0 behind the last row.

    Args:
        scores: Scores of the layer, [1, its KV heads · longest], fp32.
        before: Joined scores of the layers before it, [1, longest] if across_heads, else in the form of scores; None
            for the first layer.
        compaction: The compaction, as for compact_kv.
        longest: Rows of the longest sequence.
        kv_heads: KV heads of the result. With across_heads all of them get the same scores.
        across_heads: Whether all heads of a layer choose together, and not each KV head alone.
    """
    joined = scores.new_zeros((kv_heads, longest))
    if len(compaction):
        rows = int(compaction[0])
        own, *others = (each.view(-1, longest)[:, :rows] for each in (scores, before) if each is not None)
        joined[:, :rows] = torch.cat((own, *others)).amax(0) if across_heads else sum(others, start=own)
    return joined.view(1, -1)
