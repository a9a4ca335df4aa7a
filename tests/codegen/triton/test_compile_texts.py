"""The kernels of models that read whole texts compile offline, at the sizes of real encoders, without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.texts.pool_rows import pool_rows
from llmc.codegen.triton.kernels.texts.ragged_attention import ragged_attention
from llmc.codegen.triton.kernels.texts.segments_of_texts import segments_of_texts
from tests.codegen.triton.offline_compile import compile_checked, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_kernels_of_texts_compile(name: str, workers: Workers, tmp_path: Path) -> None:
    """MiniLM's, BERT's and ModernBERT's heads with a window, in both widths of numbers, and the widest."""
    target, starts = gpu_target(name), meta(3, dtype=torch.int32)
    shapes = [(12, 32, None, None), (16, 64, 65, None), (8, 128, None, 30.0), (4, 256, None, None)]
    kernels = [
        *node_kernels(pool_rows, (meta(2, 768), starts, meta(2, dtype=torch.int32), "mean"), target),
        *node_kernels(segments_of_texts, (meta(2, dtype=torch.int32), starts, 102, 2), target),
    ]
    for heads, dim, window, softcap in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            x = meta(2, heads, dim, dtype=dtype)
            kernels += node_kernels(ragged_attention, (x, x, x, starts, 0.125, window, softcap), target)
    compile_checked(kernels, target, workers, tmp_path)
