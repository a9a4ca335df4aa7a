"""How far two sets of logits over the same tokens lie apart."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.graph.pass_record import PassRecord
from llmc.passes.rewrite import Numerics

# Largest |Δlogit| over the standard deviation of the logits. An exact pass may still change the shape of a product,
# for which BLAS may sum in another order. In bf16 one rounding more or less is 2⁻⁸, which a few layers amplify.
BUDGETS: dict[tuple[Numerics, torch.dtype], float] = {
    (Numerics.EXACT, torch.float32): 1e-5,
    (Numerics.EXACT, torch.bfloat16): 0.05,
    (Numerics.EXACT, torch.float16): 0.01,
    (Numerics.REORDER, torch.float32): 1e-4,
    (Numerics.REORDER, torch.bfloat16): 0.3,
    (Numerics.REORDER, torch.float16): 0.1,
    (Numerics.LOSSY, torch.float32): 0.5,
    (Numerics.LOSSY, torch.bfloat16): 0.5,
    (Numerics.LOSSY, torch.float16): 0.5,
}


@dataclass(frozen=True)
class Difference:
    """The difference of two sets of logits. max, mean: maximum and mean of |Δlogit|. spread: standard deviation of the
    reference's logits. top1: share of rows with the same argmax. NaN if one of the logits is NaN."""

    max: float
    mean: float
    spread: float
    top1: float

    @property
    def relative(self) -> float:
        """The largest difference over the spread: what budgets are about."""
        return self.max / self.spread if self.spread else self.max

    @property
    def is_zero(self) -> bool:
        """Whether both are the same bits."""
        return self.max == 0.0

    def within(self, allowed: float) -> bool:
        """Whether the relative difference is allowed; NaN never is."""
        return self.relative <= allowed


def difference(logits: Tensor, reference: Tensor) -> Difference:
    """Compare logits [rows, vocabulary] with a reference of the same shape."""
    if logits is reference:
        return Difference(0.0, 0.0, float(reference.std()), 1.0)
    delta = (logits - reference).abs()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean()
    return Difference(float(delta.max()), float(delta.mean()), float(reference.std()), float(agreement))


def budget(record: PassRecord, dtype: torch.dtype) -> float:
    """The relative difference that a pass may cause: its own declared budget, or that of its numerics class."""
    return record.budget or BUDGETS[Numerics(record.numerics), dtype]
