"""Give a weight other elements, a column after the other, each time correcting those that are left for the error made.

Minimizes |X·(W - Ŵ)ᵀ|² over the calibration tokens X, whose Gram matrix XᵀX is the Hessian. With H = M·D·Mᵀ, M unit
upper triangular, that is Σ_k D_k·(e_k + Σ_{j<k} e_j·M_jk)² of the errors e = w - ŵ: so column k is chosen as if it
were w_k + Σ_{j<k} e_j·M_jk. This is the published update without the inverse of H, which would take twice the time.
Sources: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers"; Chen
et al. 2025, "The geometry of LLM quantization: GPTQ as Babai's nearest plane algorithm".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.passes.parallel_map import one_thread, parallel_map
from llmc.passes.quantization.stream import Stream

# Columns that are corrected at once by those before them.
BLOCK = 128
# Columns of a strip of XᵀX: only what lies right of its diagonal is computed. And tokens that are widened at a time.
_STRIP, _TOKENS = 192, 4096

# Gives the next columns, [count, rows], as they would be corrected now; only of this block of columns.
Ahead = Callable[[int], Tensor]
# The new values of a column: (position in the order, corrected column [rows], columns from it on) → [rows].
Choose = Callable[[int, Tensor, Ahead], Tensor]


class Sweeping(Protocol):
    """A scheme's settings of its sweep. damping: added to the Hessian's diagonal, as a share of its mean. act_order:
    process columns with the largest inputs first."""

    @property
    def name(self) -> str: ...
    @property
    def damping(self) -> float: ...
    @property
    def act_order(self) -> bool: ...


@dataclass(frozen=True)
class Solver:
    """Data shared by weights with the same input. order: the order of columns. factor: M, unit upper triangular, with
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
        """The solver for an input whose values the stream has now."""
        if self._last is None or self._last[0] is not x or self._last[1] != scheme:
            self._last = None
            hessian = gram(self._stream.parts(x), int(x.meta["val"].shape[-1]))
            self._last = x, scheme, prepare(hessian, scheme)
        return self._last[2]


def gram(parts: Iterable[Tensor], columns: int) -> Tensor:
    """XᵀX in fp32, of X in parts: [tokens, columns] each."""
    total = torch.zeros(columns, columns)
    for group in _groups(parts, columns):

        def add(start: int, values: Sequence[Tensor] = group) -> None:
            end = min(start + _STRIP, columns)
            for part in values:
                total[start:end, start:].addmm_(part[:, start:end].t(), part[:, start:])

        parallel_map(add, range(0, columns, _STRIP))
    with one_thread():
        total.triu_().add_(total.triu(1).t())
    return total


def _groups(parts: Iterable[Tensor], columns: int) -> Iterator[list[Tensor]]:
    """The parts in fp32, some of them at a time."""
    rows = [part.reshape(-1, columns) for part in parts]
    at_once = max(1, _TOKENS // max(map(len, rows)))
    for start in range(0, len(rows), at_once):
        yield parallel_map(Tensor.float, rows[start : start + at_once])


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
        block = _Block(left[start:end], original[start:end], solver.factor[start:end, start:end])
        with one_thread():
            # Unbound at once: taking views one by one costs as much as the work on them.
            columns = zip(block.left.unbind(), block.wanted.unbind(), errors.unbind(), strict=True)
            for i, (column, wanted, error) in enumerate(columns):
                torch.sub(wanted, choose(start + i, column, partial(block.corrected, i)), out=error)
                block.left[i + 1 :].addr_(block.factor[i, i + 1 :], error)
        left[end:].addmm_(solver.factor[start:end, end:].t(), errors)


@dataclass(frozen=True)
class _Block:
    """Columns that are processed one by one. left: the columns with all corrections applied. wanted: the original
    columns. factor: their part of the factor."""

    left: Tensor
    wanted: Tensor
    factor: Tensor

    def corrected(self, start: int, count: int) -> Tensor:
        """The optimum of `count` columns from `start` on, given those before: H = M·D·Mᵀ makes it w + M⁻ᵀ·(what errors
        add)."""
        span = slice(start, start + count)
        added, factor = self.left[span] - self.wanted[span], self.factor[span, span].t()
        unmixed: Tensor = torch.linalg.solve_triangular(factor, added, upper=False, unitriangular=True)
        return unmixed.add_(self.wanted[span])
