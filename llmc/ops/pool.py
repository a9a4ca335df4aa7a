"""llmc::pool — the row of a whole text, made of its tokens' rows; llmc::pool_rows, the same for many texts of a step.

    pool(x, "mean")[t] = mean of x[0] … x[t];  pool(x, "cls")[t] = x[0]
The row of a text is the pool of the text up to its last token. Other rows are unused, and a step does not compute them.
Pooling by the last token returns x itself.
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op, per_element

POOLINGS = ("mean", "cls")


def _check(call: OpCall) -> str | None:
    pooling = call.arguments["pooling"]
    return None if pooling in POOLINGS else f"pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}"


@op(fake=like("x"), stages=UNTIL_SERVING, flops=per_element(1), check=_check)
def pool(x: Tensor, pooling: str) -> Tensor:
    """The pool of the text up to each token. x: [tokens, channels] of one text; means are taken in fp32."""
    if pooling == "cls":
        return x[:1].expand_as(x).contiguous()
    counts = torch.arange(1, x.shape[0] + 1, device=x.device)[:, None]
    return (x.float().cumsum(0) / counts).to(x.dtype)


@op(
    fake=lambda a: a.x.new_empty((a.rows.shape[0], a.x.shape[1])),
    stages=FROM_SERVING,
    flops=lambda call: call.sizes("x")[0] * call.sizes("x")[1],
    check=_check,
)
def pool_rows(x: Tensor, query_starts: Tensor, rows: Tensor, pooling: str) -> Tensor:
    """The pool of the text up to each of the given rows.

    x: [tokens, channels], the tokens of all texts concatenated; those of text r are
    query_starts[r]:query_starts[r + 1]. rows: [selected], int32, indices of tokens. Returns [selected, channels].
    """
    out = x.new_empty((rows.shape[0], x.shape[1]))
    texts = torch.searchsorted(query_starts, rows, right=True) - 1
    for i, (row, text) in enumerate(zip(rows.tolist(), texts.tolist(), strict=True)):
        begin = int(query_starts[text])
        out[i] = x[begin] if pooling == "cls" else x[begin : row + 1].float().mean(0).to(x.dtype)
    return out
