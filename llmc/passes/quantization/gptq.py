"""GPTQ: round a weight's columns in order, compensating the errors of earlier ones (column_sweep.py).

Groups keep their place and their scales are fixed before (AutoGPTQ's static groups), so that act-order, which takes
the columns with the largest inputs first, costs nothing at run time.
Source: Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers".
"""

import torch
from torch import Tensor

from llmc.formats.schemes import Scheme
from llmc.graph.code_numbers import code_dtype, code_numbers, in_steps
from llmc.ops.weight_codes import nearest_codes
from llmc.passes.parallel_map import parallel_map
from llmc.passes.quantization.column_sweep import Ahead, Solver, sweep
from llmc.passes.quantization.round_weight import RoundedWeight, fitted_parts, joined, scale_spans, with_parts

# Fewer rows of a column take less time than their threads wait for each other's Python.
_LEAST_ROWS = 2048


def gptq(weight: Tensor, solver: Solver, scheme: Scheme, kept: Tensor | None = None) -> RoundedWeight:
    """Codes of a weight [rows, columns]. kept: which elements of a sparse weight are not zero, [rows, columns], bool;
    the others stay zero, whatever the errors before them ask. None: all may become anything."""
    share = -(-len(weight) // torch.get_num_threads())
    values = weight.float().masked_fill(solver.dead, 0.0)
    parts = fitted_parts(values, scheme, solver.importance)

    def rounded(span: slice) -> RoundedWeight:
        own = {name: part[span] for name, part in parts.items()}
        return _rounded(values[span], own, solver, scheme, None if kept is None else kept[span])

    return joined(parallel_map(rounded, scale_spans(weight, scheme, max(_LEAST_ROWS, share))))


def _rounded(
    values: Tensor, parts: dict[str, Tensor], solver: Solver, scheme: Scheme, kept: Tensor | None
) -> RoundedWeight:
    """Rows of a weight: each is rounded without the others."""
    scales = _of_columns(in_steps(parts["scales"], parts.get("scale_steps")), solver.order)
    zeros = _of_columns(parts["zeros"].float(), solver.order) if "zeros" in parts else None
    minima = None
    if "minima" in parts:
        minima = _of_columns(in_steps(parts["minima"], parts.get("minimum_steps")), solver.order)
    column_kept = None if kept is None else kept.t()[solver.order].unbind()
    codes: list[Tensor] = []

    def rounded(k: int, column: Tensor, ahead: Ahead) -> Tensor:
        wanted = column if column_kept is None else column.masked_fill(~column_kept[k], 0.0)
        if minima is not None:
            wanted = wanted + minima[k]
        code = nearest_codes(wanted / scales[k], None if zeros is None else zeros[k], scheme.format)
        codes.append(code)
        value = code_numbers(code, scheme.format)
        if zeros is not None:
            value.sub_(zeros[k])
        value.mul_(scales[k])
        return value if minima is None else value.sub_(minima[k])

    sweep(values, solver, rounded)
    unordered = torch.empty(values.shape[1], values.shape[0], dtype=code_dtype(scheme.format))
    unordered[solver.order] = torch.stack(codes)
    return with_parts(unordered.t().contiguous(), parts, scheme.format)


def _of_columns(groups: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Values of groups [rows, groups] as one tensor [rows] per column, in the given order."""
    return groups.t()[order // (len(order) // groups.shape[1])].unbind()
