"""llmc::gated_activation — y = activation(gate)·up."""

from torch import Tensor

from llmc.ops.activation import apply_activation
from llmc.ops.registry import FROM_CAPTURED, like, op, per_element


@op(
    fake=like("gate"),
    stages=FROM_CAPTURED,
    flops=per_element(5),
    rows=("gate", "up"),
    axes="gate[* c] up[* c] -> [* c]",
)
def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """y = activation(gate)·up in fp32, rounded once. gate, up: [..., channels] of one dtype."""
    return (apply_activation(gate.float(), activation) * up.float()).to(gate.dtype)
