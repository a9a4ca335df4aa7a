"""llmc::embedding: y[t] = weight[ids[t]], with the gathering kernel of select_rows.

Memory-bound: moves 2·T·C elements, only the rows that are looked up.
"""

from __future__ import annotations

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.kernels.select_rows import gather_launch
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.targets import GpuTarget


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """A table of a float dtype, and one id a token."""
    return refuse_dtypes(node, "weight") or refuse_ranks(node, ids=(1,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """One launch."""
    columns = call.shape("weight")[1]
    arguments = {
        "x_ptr": call.weight("weight", Layout.ROWS),
        "x_row_stride": columns,
        "rows_ptr": call.vector("ids"),
        **rows("y", call.result()),
    }
    return (gather_launch(arguments, columns, call.count("ids")),)


embedding = KernelTemplate(torch.ops.llmc.embedding.default, supports, candidates)
