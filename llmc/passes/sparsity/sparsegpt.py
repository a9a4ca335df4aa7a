"""SparseGPT: choose a weight's zeros a few columns at a time, and correct the remaining columns for the loss.

An element w of column k costs D_k·w² if it becomes zero and all columns after it are corrected (column_sweep.py; the
paper's w² / [H⁻¹]_kk). The cheapest of each block of 128 columns go, over all rows, so that rows and columns that
matter keep more; with a pattern, the cheapest of each run of columns in each row. Each time the columns are judged as
they are corrected then.
Source: Frantar and Alistarh 2023, "SparseGPT: massive language models can be accurately pruned in one-shot".
"""

import torch
from torch import Tensor

from llmc.formats.sparsity import SparseScheme
from llmc.passes.quantization.column_sweep import BLOCK, Ahead, Solver, sweep
from llmc.passes.sparsity.choose_zeros import kept_elements


def sparsegpt(weight: Tensor, solver: Solver, scheme: SparseScheme) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns] with zeros and other elements, of its dtype, and which are kept: bool. The solver's
    order is the columns' own."""
    values = weight.float().clone()
    values[:, solver.dead] = 0.0
    columns = values.shape[1]
    at_once = BLOCK if scheme.pattern is None else scheme.pattern[1]
    solved = torch.empty(columns, values.shape[0], dtype=weight.dtype)
    kept = torch.empty(solved.shape, dtype=torch.bool)

    def pruned(k: int, column: Tensor, ahead: Ahead) -> Tensor:
        if k % at_once == 0:
            end = min(k + at_once, columns)
            cost = ahead(end - k).square_().mul_(solver.pivots[k:end, None])
            kept[k:end] = kept_elements(cost.t().contiguous(), scheme, by_row=False).t()
        # Later columns also compensate for the rounding to the weight's dtype.
        solved[k] = column.masked_fill(~kept[k], 0.0)
        return solved[k].float()

    sweep(values, solver, pruned)
    return solved.t().contiguous(), kept.t().contiguous()
