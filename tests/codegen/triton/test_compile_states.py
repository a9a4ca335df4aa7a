"""The kernels with states compile offline, at the sizes of models that there are, without spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.states.causal_conv import causal_conv
from llmc.codegen.triton.kernels.states.linear_attention import linear_attention
from llmc.codegen.triton.kernels.states.linear_recurrence import linear_recurrence
from llmc.codegen.triton.kernels.states.selective_scan import selective_scan
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.offline_compile import compile_checked, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target


def _numbers(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def _kernels(
    template: KernelTemplate, target: GpuTarget, *arguments: Any, state: tuple[int, ...]
) -> list[DeviceKernel]:
    step = [meta(count, dtype=torch.int32) for count in (3, 2, 2)]
    return node_kernels(template, (*arguments, _numbers(4, *state), *step), target)


def _attention(target: GpuTarget, heads: int, key: int, value: int, channels: bool, delta: bool) -> list[DeviceKernel]:
    x, shape = _numbers(2, heads, key), ((heads, key) if channels else (heads,))
    beta = _numbers(2, heads) if delta else None
    given = x, x, _numbers(2, heads, value), _numbers(2, *shape), beta
    return _kernels(linear_attention, target, *given, state=(heads, key, value))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_kernels_with_states_compile(name: str, workers: Workers, tmp_path: Path) -> None:
    """Those of Mamba 2.8B, RecurrentGemma 9B, Mamba 2, Qwen3-Next, Kimi Linear, xLSTM 7B, and the widest keys."""
    target = gpu_target(name)
    x, rates, n = _numbers(2, 5120), _numbers(5120, 16), _numbers(2, 16)
    kernels = [
        *_kernels(causal_conv, target, meta(2, 5120), meta(4, 5120), meta(5120), state=(3, 5120)),
        *_kernels(selective_scan, target, x, x, rates, n, n, state=(5120, 16)),
        *_kernels(linear_recurrence, target, x, x, 0.0, False, state=(5120,)),
        *_kernels(linear_recurrence, target, x, x, -1e38, True, state=(5120,)),
        *_attention(target, 80, 128, 64, channels=False, delta=False),
        *_attention(target, 32, 128, 128, channels=False, delta=True),
        *_attention(target, 32, 128, 128, channels=True, delta=True),
        *_attention(target, 8, 256, 512, channels=False, delta=False),
        *_attention(target, 1, 2048, 64, channels=True, delta=True),
    ]
    compile_checked(kernels, target, workers, tmp_path)
