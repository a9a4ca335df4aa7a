"""GPTQ: round a weight's columns in order, compensating the errors of earlier ones (column_sweep.py).

Groups keep their place and their scales are fixed before (AutoGPTQ's static groups), so that act-order, which takes
the columns with the largest inputs first, costs nothing at run time.
Source: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers".
"""

import torch
from torch import Tensor

from llmc.formats.schemes import Scheme
from llmc.ops.weight_codes import nearest_codes
from llmc.passes.parallel_map import parallel_map
from llmc.passes.quantization.column_sweep import Ahead, Solver, sweep
from llmc.passes.quantization.round_weight import RoundedWeight, fitted_scales, joined, scale_spans

# Fewer rows of a column take less time than their threads wait for each other's Python.
_LEAST_ROWS = 2048


def gptq(weight: Tensor, solver: Solver, scheme: Scheme, kept: Tensor | None = None) -> RoundedWeight:
    """Codes of a weight [rows, columns]. kept: which elements of a sparse weight are not zero, [rows, columns], bool;
    the others stay zero, whatever the errors before them ask. None: all may become anything."""
    share = -(-len(weight) // torch.get_num_threads())
    spans = scale_spans(weight, scheme, max(_LEAST_ROWS, share))
    return joined(parallel_map(lambda s: _rounded(weight[s], solver, scheme, None if kept is None else kept[s]), spans))


def _rounded(weight: Tensor, solver: Solver, scheme: Scheme, kept: Tensor | None) -> RoundedWeight:
    """Rows of a weight: each is rounded without the others."""
    values = weight.float().clone()
    values[:, solver.dead] = 0.0
    scales, zeros = fitted_scales(values, scheme, solver.importance)
    width = weight.shape[1] // scales.shape[1]
    groups = solver.order // width
    column_scales = scales.float().t()[groups].unbind()
    column_zeros = None if zeros is None else zeros.float().t()[groups].unbind()
    column_kept = None if kept is None else kept.t()[solver.order].unbind()
    codes: list[Tensor] = []

    def rounded(k: int, column: Tensor, ahead: Ahead) -> Tensor:
        scale, zero = column_scales[k], None if column_zeros is None else column_zeros[k]
        scaled = column / scale
        if column_kept is not None:
            scaled.masked_fill_(~column_kept[k], 0.0)
        code = nearest_codes(scaled, zero, scheme.format)
        codes.append(code)
        value = code.float() if zero is None else code.float() - zero
        return value.mul_(scale)

    sweep(values, solver, rounded)
    unordered = torch.empty(weight.shape[1], weight.shape[0], dtype=torch.int8)
    unordered[solver.order] = torch.stack(codes)
    return RoundedWeight(unordered.t().contiguous(), scales, zeros, scheme.format)
