"""llmc::all_reduce: the sum of all ranks' x, where no norm has claimed it (rows/norm_templates.py)."""

import torch

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.ranks.reduce_ways import NOTHING, Following, reduce_launches
from llmc.codegen.triton.kernels.refusals import takes
from llmc.targets import GpuTarget


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the ways to add: through the ranks' memory for few rows, and by a library for more."""
    return reduce_launches(call, call.result(), Following(NOTHING), target)


all_reduce = KernelTemplate(torch.ops.llmc.all_reduce.default, takes("x[rows | channels]"), candidates)
