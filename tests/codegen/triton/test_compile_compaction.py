"""The kernels that score and move rows compile for every instruction set: no spills, shared memory that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.compaction.compact_kv import compact_kv
from llmc.codegen.triton.kernels.compaction.join_scores import join_scores
from llmc.codegen.triton.kernels.compaction.keep_sums import keep_sums
from llmc.codegen.triton.kernels.compaction.last_uses import last_uses
from llmc.codegen.triton.kernels.compaction.peak_attention import peak_attention
from llmc.codegen.triton.kernels.compaction.score_expected import score_expected
from llmc.codegen.triton.kernels.compaction.score_keys import score_keys
from llmc.codegen.triton.kernels.compaction.score_leverage import score_leverage
from llmc.codegen.triton.kernels.compaction.sum_attention import sum_attention
from llmc.codegen.triton.kernels.compaction.turn_rows import turn_rows
from llmc.formats.cache_format import parse_cache_format
from llmc.ops.score_leverage import SKETCH
from tests.codegen.triton.offline_compile import compile_checked, meta, node_kernels
from tests.gpu_target import each_kind_of_gpu, gpu_target

_LONGEST = 8192


@pytest.mark.parametrize("name", each_kind_of_gpu("a100", "h100", "b200", "mi300x"))
@pytest.mark.parametrize(
    ("channels", "format", "dtype"),
    [
        (128, None, torch.bfloat16),
        pytest.param(256, None, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, None, torch.float32, marks=pytest.mark.slow),
        (128, "int4:g32", torch.bfloat16),
        pytest.param(80, "fp8", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_rows_of_llama_3(
    name: str, channels: int, format: str | None, dtype: torch.dtype, workers: Workers, tmp_path: Path
) -> None:
    target = gpu_target(name)
    queries, numbers = meta(64, 32, 16, channels // 2, dtype=dtype), meta(700, dtype=torch.int32)
    width = channels if format is None else parse_cache_format(format).position_bytes(channels)
    cache = meta(64, 8, 16, width, dtype=dtype if format is None else torch.uint8)
    sums, scores = meta(64, 8, 16, 1, dtype=torch.float32), meta(1, 8 * _LONGEST, dtype=torch.float32)
    updated = (queries, queries, cache, sums, numbers, 0.1, None, _LONGEST, format)
    inv_freq = meta(channels // 2, dtype=torch.float32)
    sketched = (queries, queries, cache, cache, sums, sums, numbers, meta(channels, SKETCH, dtype=torch.float32))
    turned = (inv_freq, False, format is not None, 0.1, None, 8, 4, channels, _LONGEST, format)
    of_head = meta(1, _LONGEST, dtype=torch.float32)
    means = meta(32, channels + channels // 2, dtype=torch.float32)
    expected = (cache, numbers, means, inv_freq, False, format is not None, 4, 64, _LONGEST, format)
    kernels = [
        *node_kernels(score_keys, (queries, queries, cache, numbers, 0.1, 5, 30.0, _LONGEST, format), target),
        *node_kernels(sum_attention, updated, target),
        *node_kernels(last_uses, updated, target),
        *node_kernels(peak_attention, updated, target),
        *node_kernels(score_leverage, (*sketched, *turned), target),
        *node_kernels(score_expected, expected, target),
        *node_kernels(join_scores, (scores, scores, numbers, _LONGEST, 8, False), target),
        *node_kernels(join_scores, (scores, of_head, numbers, _LONGEST, 8, True), target),
        *node_kernels(compact_kv, (cache, cache, scores, numbers, channels, channels, 4, 64, format), target),
        *node_kernels(keep_sums, (sums, scores, numbers, 4, 64), target),
        *node_kernels(turn_rows, (cache, cache, numbers, inv_freq, False, 4, channels, channels, format), target),
    ]
    compile_checked(kernels, target, workers, tmp_path)
