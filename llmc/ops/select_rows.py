"""llmc::select_rows — y[i] = x[rows[i]]: keeps only the tokens whose logits are requested."""

from torch import Tensor

from llmc.ops.registry import FROM_SERVING, op, per_element


@op(
    fake=lambda a: a.x.new_empty((a.rows.shape[0], *a.x.shape[1:])),
    stages=FROM_SERVING,
    flops=per_element(0),
    table="x",
)
def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows. x: [tokens, channels]; rows: [selected], int32; returns [selected, channels]."""
    return x[rows.long()]
