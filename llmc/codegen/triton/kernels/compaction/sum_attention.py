"""llmc::sum_attention: the sums of a request's rows, and the attention of its last queries added (key_masses.py)."""

from dataclasses import replace

import torch

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.compaction.key_masses import mass_launches, refuse_scoring
from llmc.targets import GpuTarget


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    first, second = mass_launches(call, call.result().pointer, sums="sums")
    return (replace(first, then=(second,)),)


sum_attention = KernelTemplate(torch.ops.llmc.sum_attention.default, refuse_scoring, candidates)
