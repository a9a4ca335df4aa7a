"""llmc::layer_norm and llmc::add_layer_norm. Source: Ba, Kiros and Hinton 2016."""

import torch

from llmc.codegen.triton.kernels.rows.norm_templates import norm

layer_norm = norm(torch.ops.llmc.layer_norm.default, centred=True)
add_layer_norm = norm(torch.ops.llmc.add_layer_norm.default, centred=True)
