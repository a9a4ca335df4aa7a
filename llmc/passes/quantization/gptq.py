"""GPTQ: round a weight's columns one after the other, each time correcting those that are left for the error made.

Minimizes |X·(W - Ŵ)ᵀ|² over the calibration tokens X, whose Gram matrix XᵀX is the Hessian. With H = M·D·Mᵀ, M unit
upper triangular, that is Σ_k D_k·(e_k + Σ_{j<k} e_j·M_jk)² of the errors e = w - ŵ: so column k is rounded as if it
were w_k + Σ_{j<k} e_j·M_jk. This is the published update without the inverse of H, which would take twice the time.
Groups keep their place and their scales are fixed before (AutoGPTQ's static groups), so that act-order, which takes
the columns with the largest inputs first, costs nothing at run time.
Sources: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers"; Chen
et al. 2025, "The geometry of LLM quantization: GPTQ as Babai's nearest plane algorithm".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.errors import PassError
from llmc.formats.schemes import Scheme
from llmc.ops.weight_codes import nearest_codes
from llmc.passes.quantization.round_weight import RoundedWeight, fitted_scales, one_thread

_BLOCK = 128
# Columns of a strip of XᵀX: only what lies right of its diagonal is computed.
_STRIP = 1024


@dataclass(frozen=True)
class Solver:
    """What weights of the same input share. order: columns as they are taken. factor: M, unit upper triangular, with
    H = M·D·Mᵀ in that order and D diagonal. importance: [columns], the Hessian's diagonal. dead: columns whose input is
    always 0."""

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
    # Factored from the last column backwards, so that the factor is upper triangular in the order.
    backwards = order.flip(0)
    lower, failed = torch.linalg.cholesky_ex(hessian[backwards][:, backwards])
    if int(failed):
        raise PassError(
            f"the Hessian of {len(dead)} inputs is not positive definite",
            at=scheme.name,
            fix="use more calibration text, or more damping: int4-gptq:damp=0.1",
        )
    return Solver(order, lower.div_(lower.diagonal().clone()).flip(0, 1), importance, dead)


def gptq(weight: Tensor, solver: Solver, scheme: Scheme) -> RoundedWeight:
    """Codes of a weight [rows, columns]."""
    values = weight.float().clone()
    values[:, solver.dead] = 0.0
    scales, zeros = fitted_scales(values, scheme, solver.importance)
    width = weight.shape[1] // scales.shape[1]
    # Columns lie in rows here, since one is taken at a time.
    left = values.t()[solver.order].contiguous()
    original = left.clone()
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
                torch.sub(original[start + i], value.mul_(scale), out=errors[i])
                block[i + 1 :].addr_(factor[i, i + 1 :], errors[i])
        left[end:].addmm_(solver.factor[start:end, end:].t(), errors)
    unordered = torch.empty_like(codes)
    unordered[solver.order] = codes
    return RoundedWeight(unordered.t().contiguous(), scales, zeros, scheme.format)
