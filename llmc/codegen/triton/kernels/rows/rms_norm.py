"""llmc::rms_norm and llmc::add_rms_norm. Source: Zhang and Sennrich 2019."""

import torch

from llmc.codegen.triton.kernels.rows.norm_templates import norm

rms_norm = norm(torch.ops.llmc.rms_norm.default, centred=False)
add_rms_norm = norm(torch.ops.llmc.add_rms_norm.default, centred=False)
