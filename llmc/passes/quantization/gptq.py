"""GPTQ: round a weight's columns one after the other, each time correcting those that are left for the error made.

Minimizes |X·(W - Ŵ)ᵀ|² over the calibration tokens X, whose Gram matrix XᵀX is the Hessian. Groups keep their place and
their scales are fixed before (AutoGPTQ's static groups), so that act-order, which takes the columns with the largest
inputs first, costs nothing at run time.
Source: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.errors import PassError
from llmc.ops.weight_codes import nearest_codes
from llmc.passes.quantization.round_weight import RoundedWeight, fitted_scales, one_thread
from llmc.schemes import Scheme

_BLOCK = 128
# Below this many columns LAPACK's triangular solve is as good as products.
_LEAF = 512
# Columns of a strip of XᵀX: only what lies right of its diagonal is computed.
_STRIP = 1024


@dataclass(frozen=True)
class Solver:
    """What weights of the same input share. order: columns as they are taken. factor: U, upper triangular, with
    H⁻¹ = UᵀU in that order. importance: [columns], the Hessian's diagonal. dead: columns whose input is always 0."""

    order: Tensor
    factor: Tensor
    importance: Tensor
    dead: Tensor


def gram(parts: Iterable[Tensor], columns: int) -> Tensor:
    """XᵀX in fp32, of X in parts: [tokens, columns] each."""
    total = torch.zeros(columns, columns)
    for part in parts:
        values = part.reshape(-1, columns).float()
        for start in range(0, columns, _STRIP):
            end = min(start + _STRIP, columns)
            total[start:end, start:].addmm_(values[:, start:end].t(), values[:, start:])
    total.triu_().add_(total.triu(1).t())
    return total


def prepare(hessian: Tensor, scheme: Scheme) -> Solver:
    """Factor a Hessian [columns, columns], fp32, which is overwritten. Raises PassError if damping does not save it."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    importance = diagonal.clone()
    order = torch.argsort(importance, descending=True, stable=True) if scheme.act_order else torch.arange(len(dead))
    diagonal += scheme.damping * importance.mean()
    # Factored from the last column backwards, H = RRᵀ with R upper triangular, so that U = R⁻¹ takes one inversion.
    backwards = order.flip(0)
    lower, failed = torch.linalg.cholesky_ex(hessian[backwards][:, backwards])
    if int(failed):
        raise PassError(
            f"the Hessian of {len(dead)} inputs is not positive definite",
            at=scheme.name,
            fix="use more calibration text, or more damping: int4-gptq:damp=0.1",
        )
    return Solver(order, _inverse(lower).flip(0, 1), importance, dead)


def _inverse(lower: Tensor) -> Tensor:
    """Of a lower triangular matrix, by halves: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹·B·A⁻¹, C⁻¹]]."""
    size = len(lower)
    if size <= _LEAF:
        leaf: Tensor = torch.linalg.solve_triangular(lower, torch.eye(size), upper=False)
        return leaf
    half = size // 2
    result = torch.zeros_like(lower)
    result[:half, :half] = _inverse(lower[:half, :half])
    result[half:, half:] = _inverse(lower[half:, half:])
    result[half:, :half] = -(result[half:, half:] @ (lower[half:, :half] @ result[:half, :half]))
    return result


def gptq(weight: Tensor, solver: Solver, scheme: Scheme) -> RoundedWeight:
    """Codes of a weight [rows, columns]."""
    values = weight.float().clone()
    values[:, solver.dead] = 0.0
    scales, zeros = fitted_scales(values, scheme, solver.importance)
    width = weight.shape[1] // scales.shape[1]
    # Columns lie in rows here, since one is taken at a time.
    left = values.t()[solver.order].contiguous()
    groups = solver.order // width
    column_scales = scales.float().t()[groups].contiguous()
    column_zeros = None if zeros is None else zeros.float().t()[groups].contiguous()
    codes = torch.empty(left.shape, dtype=torch.int8)
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        errors = torch.empty(end - start, left.shape[1])
        block, factor = left[start:end], solver.factor[start:end, start:end]
        with one_thread():
            for i in range(end - start):
                scale = column_scales[start + i]
                zero = None if column_zeros is None else column_zeros[start + i]
                code = nearest_codes(block[i] / scale, zero, scheme.format)
                codes[start + i] = code
                value = code.float() if zero is None else code.float() - zero
                errors[i] = (block[i] - value * scale) / factor[i, i]
                block[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1.0)
        left[end:].addmm_(solver.factor[start:end, end:].t(), errors, alpha=-1.0)
    unordered = torch.empty_like(codes)
    unordered[solver.order] = codes
    return RoundedWeight(unordered.t().contiguous(), scales, zeros, scheme.format)
