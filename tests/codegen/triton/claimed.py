"""Arguments of products that their kernels compute on the way: weights in codes, x that is rounded or normed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_OPS = torch.ops.llmc


@dataclass(frozen=True)
class Claimed:
    """An argument that another op yields, which the kernel computes on the way."""

    op: Any
    arguments: tuple[Any, ...]

    @property
    def shape(self) -> torch.Size:
        """That of the op's first argument."""
        size: torch.Size = self.arguments[0].shape
        return size

    @property
    def dtype(self) -> torch.dtype:
        """What the op is asked for, or its first argument's."""
        dtype: torch.dtype = next((a for a in self.arguments if isinstance(a, torch.dtype)), self.arguments[0].dtype)
        return dtype


def values_of(arguments: Sequence[Any]) -> list[Any]:
    """A node's arguments as its op takes them."""
    return [a.op(*values_of(a.arguments)) if isinstance(a, Claimed) else a for a in arguments]


def rounded(
    x: Tensor | Claimed, format: str, scale: Tensor | None = None, group: int | None = None
) -> Tensor | Claimed:
    """x as a product reads it: rounded to codes of a format on the way, or as it is for "none"."""
    return x if format == "none" else Claimed(_OPS.round_tokens.default, (x, scale, format, torch.float32, group))


def normed(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Claimed:
    """x as a product reads it that norms it on the way."""
    return Claimed(_OPS.rms_norm.default, (x, weight, eps))
