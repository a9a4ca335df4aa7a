"""llmc::peak_attention: the largest attention to each of a request's rows, with its last queries' (key_masses.py)."""

from dataclasses import replace

import torch

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.compaction.key_masses import mass_launches, refuse_scoring
from llmc.targets import GpuTarget


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    first, second = mass_launches(call, call.result().pointer, sums="sums", peaks=True)
    return (replace(first, then=(second,)),)


peak_attention = KernelTemplate(torch.ops.llmc.peak_attention.default, refuse_scoring, candidates)
