"""An engine that its GPU cannot hold is refused before anything is compiled, with the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.codegen.triton.memory_fit import check_memory, fitting_sequences
from llmc.errors import OptionError
from llmc.options import BuildOptions
from tests.codegen.tiny_models import llama
from tests.gpu_target import gpu_target


def test_too_little_memory_is_named_with_its_parts() -> None:
    target = gpu_target("l4")
    program = lower_device(llama(torch.float32)[0], target, BuildOptions()).program
    check_memory(program, target, BuildOptions())
    with pytest.raises(
        OptionError, match=r"needs 1\.\d+ GB, and l4 has 1\.00 GB: weights .* KV cache .* arena .* logits"
    ):
        check_memory(program, replace(target, memory_bytes=10**9), BuildOptions())
    huge = replace(program, limits=replace(program.limits, max_model_len=10**9))
    with pytest.raises(OptionError, match="one sequence of 1000000000 tokens"):
        check_memory(huge, target, BuildOptions())


def test_the_sequences_that_were_asked_for_must_fit_and_the_default_ones_need_not() -> None:
    target = gpu_target("l4")
    program = lower_device(llama(torch.float32)[0], target, BuildOptions()).program
    # 2 layers of 2 heads of 12 + 12 numbers of fp32 a position.
    length = 24 * 10**9 // (2 * 2 * 24 * 4) // 3
    long = replace(program, limits=replace(program.limits, max_model_len=length, max_sequences=64))
    assert fitting_sequences(long, target) == 2
    check_memory(long, target, BuildOptions())
    check_memory(long, target, BuildOptions(max_sequences=64))
    check_memory(long, target, BuildOptions(max_model_len=length))
    with pytest.raises(OptionError, match="KV cache of 64 sequences") as caught:
        check_memory(long, target, BuildOptions(max_sequences=64, max_model_len=length))
    assert "at most 2 of that length fit" in str(caught.value.fix)
