"""llmc::lora — what adapters add to a product's sums: y[t] = (x[t]·A[s]ᵀ)·B[s], where s is the slot of t's adapter."""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import WHEN_OPTIMIZED, op


def _check(call: OpCall) -> str | None:
    x, a, b = call.shape("x"), call.shape("lora_a"), call.shape("lora_b")
    ends = call.arguments["ends"]
    if len(a) != 4 or len(b) != 3 or a[3] != x[-1] or a[0] != b[0] or a[2] != b[1]:
        return f"A {a} and B {b} do not fit x {x}"
    return (
        None if len(ends) == a[1] and ends[-1] == b[2] else f"parts end at {ends}, of {a[1]} parts and {b[2]} columns"
    )


@op(
    fake=lambda a: a.x.new_empty((a.x.shape[0], a.lora_b.shape[2]), dtype=torch.float32),
    stages=WHEN_OPTIMIZED,
    # The cost of a step without adapters. With adapters it depends on their ranks, which are unknown in a graph.
    flops=lambda call: 0 * call.elements(),
    rows=("x", "adapters"),
    check=_check,
)
def lora(x: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, adapters: Tensor, ends: list[int]) -> Tensor:
    """Compute the adapters' part of a product, in fp32: 0 for tokens without an adapter (kernels leave these rows
    unchanged, because they are not read).

    x: [tokens, channels]; lora_a: [slots, parts, max_rank, channels]; lora_b: [slots, max_rank, columns], with the
    scale in it; ranks: [slots, parts], int32; adapters: [tokens], int32, 0 for none or 1 + the slot. Part p has the
    columns up to ends[p]. Source: Hu et al. 2021, "LoRA"; Chen et al. 2023, "Punica: multi-tenant LoRA serving".
    """
    y = x.new_zeros((x.shape[0], lora_b.shape[2]), dtype=torch.float32)
    for token, adapter in enumerate(adapters.tolist()):
        if adapter == 0:
            continue
        begin = 0
        for part, end in enumerate(ends):
            rank = int(ranks[adapter - 1, part])
            shrunk = lora_a[adapter - 1, part, :rank].float() @ x[token].float()
            y[token, begin:end] = shrunk @ lora_b[adapter - 1, :rank, begin:end].float()
            begin = end
    return y
