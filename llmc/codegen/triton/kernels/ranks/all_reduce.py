"""llmc::all_reduce: the sum of all ranks' x, where no norm has claimed it (rows/norm_templates.py)."""

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.ranks.reduce_ways import NOTHING, Following, reduce_launches
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [rows, channels] of a float dtype."""
    return refuse_dtypes(node, "x") or refuse_ranks(node, x=(2,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """By the ranks' memory for few rows, by a library for more."""
    return reduce_launches(call, call.result(), Following(NOTHING), target)


all_reduce = KernelTemplate(torch.ops.llmc.all_reduce.default, supports, candidates)
