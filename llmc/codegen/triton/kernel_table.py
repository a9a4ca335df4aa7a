"""Which Triton kernel computes an llmc:: op: one table."""

from __future__ import annotations

from typing import Any

import llmc.ops  # noqa: F401  (registers the ops that the kernels name)
from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear, lm_head
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.gated_activation import gated_activation
from llmc.codegen.triton.kernels.rows.layer_norm import add_layer_norm, layer_norm
from llmc.codegen.triton.kernels.rows.rms_norm import add_rms_norm, rms_norm
from llmc.codegen.triton.kernels.rows.rope import rope
from llmc.codegen.triton.kernels.rows.rope_angles import rope_angles
from llmc.codegen.triton.kernels.rows.select_channels import select_channels
from llmc.codegen.triton.kernels.rows.select_rows import select_rows
from llmc.codegen.triton.kernels.sampling.draw_rows import argmax_rows, draw_rows
from llmc.codegen.triton.kernels.sampling.row_masses import row_masses
from llmc.codegen.triton.kernels.sampling.sample_candidates import sample_candidates
from llmc.codegen.triton.kernels.sampling.top_k_rows import top_k_rows

_TEMPLATES: tuple[KernelTemplate, ...] = (
    embedding,
    rms_norm,
    add_rms_norm,
    layer_norm,
    add_layer_norm,
    rope_angles,
    rope,
    kv_write,
    rope_kv_write,
    gated_activation,
    linear,
    fused_linear,
    gated_linear,
    lm_head,
    paged_attention,
    select_rows,
    select_channels,
    argmax_rows,
    draw_rows,
    top_k_rows,
    row_masses,
    sample_candidates,
)

KERNELS: dict[Any, KernelTemplate] = {template.op: template for template in _TEMPLATES}
