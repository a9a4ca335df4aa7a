"""SparseGPT as published (Frantar and Alistarh 2023, algorithm 1), in fp64 with the inverse of the Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def plain_sparsegpt(weight: Tensor, x: Tensor, ratio: float, pattern: tuple[int, int] | None) -> Tensor:
    """A weight [rows, columns], sparse, for inputs x [tokens, columns]."""
    left = weight.double().clone()
    hessian = x.double().t() @ x.double()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1.0
    left[:, dead] = 0.0
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for start in range(0, left.shape[1], BLOCK):
        end = min(start + BLOCK, left.shape[1])
        pruned = torch.zeros(left.shape[0], end - start, dtype=torch.bool)
        if pattern is None:
            cost = left[:, start:end].square() / upper.diagonal()[start:end].square()
            pruned.view(-1)[cost.flatten().argsort()[: round(ratio * cost.numel())]] = True
        for k in range(start, end):
            if pattern is not None and k % pattern[1] == 0:
                run = slice(k, k + pattern[1])
                cost = left[:, run].square() / upper.diagonal()[run].square()
                fewest = cost.argsort(1)[:, : pattern[1] - pattern[0]]
                pruned[:, k - start : k - start + pattern[1]].scatter_(1, fewest, True)
            value = left[:, k].masked_fill(pruned[:, k - start], 0.0)
            error = (left[:, k] - value) / upper[k, k]
            # To the last column at once: what the paper puts off to the end of a block comes to the same.
            left[:, k:] -= error[:, None] * upper[k, k:]
            left[:, k] = value
    return left
