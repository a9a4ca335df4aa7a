"""Give a weight other elements, a column after the other, each time correcting those that are left for the error made.

Minimizes |X·(W - Ŵ)ᵀ|² over the calibration tokens X, whose Gram matrix XᵀX is the Hessian. With H = M·D·Mᵀ, M unit
upper triangular, that is Σ_k D_k·(e_k + Σ_{j<k} e_j·M_jk)² of the errors e = w - ŵ: so column k is chosen as if it
were w_k + Σ_{j<k} e_j·M_jk. This is the published update without the inverse of H, which would take twice the time.
Sources: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers"; Chen
et al. 2025, "The geometry of LLM quantization: GPTQ as Babai's nearest plane algorithm".
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.passes.quantization.round_weight import one_thread
from llmc.passes.quantization.stream import Stream

# Columns that are corrected at once by those before them.
BLOCK = 128
# Columns of a strip of XᵀX: only what lies right of its diagonal is computed.
_STRIP = 1024

# Gives the next columns, [count, rows], as they would be corrected now; of this block of columns alone.
Ahead = Callable[[int], Tensor]
# What a column becomes: the place in the order, the corrected column [rows], and the ones from it on → [rows].
Choose = Callable[[int, Tensor, Ahead], Tensor]


class Sweeping(Protocol):
    """What a scheme says of its sweep. damping: of the Hessian's diagonal, as a share of its mean. act_order: columns
    with the largest inputs come first."""

    @property
    def name(self) -> str: ...
    @property
    def damping(self) -> float: ...
    @property
    def act_order(self) -> bool: ...


@dataclass(frozen=True)
class Solver:
    """What weights of the same input share. order: columns as they are taken. factor: M, unit upper triangular, with
    H = M·D·Mᵀ in that order and D diagonal. pivots: D, [columns] in that order. importance: [columns], the Hessian's
    diagonal. dead: columns whose input is always 0."""

    order: Tensor
    factor: Tensor
    pivots: Tensor
    importance: Tensor
    dead: Tensor


class InputSolvers:
    """Factors the Hessian of a product's input, once for all products of the same input that follow each other."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last: tuple[fx.Node, Sweeping, Solver] | None = None

    def of(self, x: fx.Node, scheme: Sweeping) -> Solver:
        """Of an input whose values the stream has now."""
        if self._last is None or self._last[0] is not x or self._last[1] != scheme:
            self._last = None
            hessian = gram(self._stream.parts(x), int(x.meta["val"].shape[-1]))
            self._last = x, scheme, prepare(hessian, scheme)
        return self._last[2]


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


def prepare(hessian: Tensor, scheme: Sweeping) -> Solver:
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
            fix="use more calibration text, or of GPTQ more damping: int4-gptq:damp=0.1",
        )
    roots = lower.diagonal().clone()
    return Solver(order, lower.div_(roots).flip(0, 1), roots.square().flip(0), importance, dead)


def sweep(weight: Tensor, solver: Solver, choose: Choose) -> None:
    """Let `choose` decide on each column of a weight [rows, columns], fp32, in the solver's order."""
    # Columns lie in rows here, since one is taken at a time.
    original = weight.t()[solver.order].contiguous()
    left = original.clone()
    for start in range(0, len(left), BLOCK):
        end = min(start + BLOCK, len(left))
        errors = torch.empty(end - start, left.shape[1])
        block, wanted, factor = left[start:end], original[start:end], solver.factor[start:end, start:end]
        with one_thread():
            for i in range(end - start):
                ahead = partial(_corrected, block[i:], wanted[i:], factor[i:, i:])
                torch.sub(wanted[i], choose(start + i, block[i], ahead), out=errors[i])
                block[i + 1 :].addr_(factor[i, i + 1 :], errors[i])
        left[end:].addmm_(solver.factor[start:end, end:].t(), errors)


def _corrected(block: Tensor, wanted: Tensor, factor: Tensor, count: int) -> Tensor:
    """The optimum of the next columns, given those that are chosen: H = M·D·Mᵀ makes it w + M⁻ᵀ·(what errors add)."""
    added = block[:count] - wanted[:count]
    unmixed: Tensor = torch.linalg.solve_triangular(factor[:count, :count].t(), added, upper=False, unitriangular=True)
    unmixed.add_(wanted[:count])
    return unmixed
