"""An engine that its GPU cannot hold is refused before anything is compiled, with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.codegen.triton.memory_fit import RESERVED_BYTES, check_memory, fitting_sequences
from llmc.errors import OptionError
from llmc.frontends.capture import capture
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.program import Nearest, Program, RankLayout
from llmc.simulation.programs import model_programs
from tests.codegen.tiny_models import llama
from tests.gpu_target import gpu_target

MODEL = Path(__file__).parents[3] / "examples" / "models" / "bard-6m"
ONE_SEQUENCE = BuildOptions(max_model_len=2048, max_batch_tokens=64, max_sequences=1)


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


def test_each_sequence_counts_with_its_window_and_a_step_once() -> None:
    plain = lower_device(llama(torch.float32)[0], gpu_target("l4"), BuildOptions()).program
    limits = replace(plain.limits, max_model_len=65536, max_sequences=8, max_batch_tokens=8192)
    whole, windowed = plain.caches[0], replace(plain.caches[1], group=1)
    program = replace(plain, limits=limits, caches=(whole, windowed), policies=(Nearest(1024),))
    fixed = sum(slot.nbytes for slot in program.weights) + RESERVED_BYTES
    fixed += program.arena.at(tokens=8192, logit_rows=limits.max_logit_rows)
    fixed += 4 * limits.max_logit_rows * program.vocab_size
    # Of the windows 1024 rows, which may begin inside a block, and 63 that drafts may need.
    rows = 8 * 65536 + 8 * 69 * 16 + 8192 + 64
    enough = replace(gpu_target("l4"), memory_bytes=fixed + rows * whole.bytes_per_block(16) // 16)
    options = BuildOptions(max_sequences=8, max_model_len=65536)
    check_memory(program, enough, options)
    assert fitting_sequences(program, enough) == 8
    less = replace(enough, memory_bytes=enough.memory_bytes - 1)
    with pytest.raises(OptionError, match=r"(?s)8 sequences .* at most 7 of that length fit"):
        check_memory(program, less, options)


@pytest.fixture(scope="module")
def program_of() -> Callable[[RankLayout], Program]:
    """Of the shipped model, by layout."""
    captured = capture(MODEL, ONE_SEQUENCE, may_lack_weights=True)
    return cache(model_programs(captured, default(), ONE_SEQUENCE, gpu_target("h100")).program)


@pytest.mark.parametrize(
    ("lacking", "advice"),
    [
        (lambda weights, sequence: sequence // 2, "one sequence of at most 1024 tokens fits"),
        (lambda weights, sequence: sequence + weights // 8, "not even its weights fit"),
    ],
    ids=["cache", "weights"],
)
def test_what_does_fit_is_named(
    program_of: Callable[[RankLayout], Program], lacking: Callable[[int, int], int], advice: str
) -> None:
    """What is named fits, and nothing longer does."""
    program = program_of(RankLayout())
    weights = sum(slot.nbytes for slot in program.weights)
    sequence = 2048 // 16 * sum(each.bytes_per_block(16) for each in program.caches)
    rest = program.arena.at(tokens=program.limits.max_batch_tokens, logit_rows=program.limits.max_logit_rows)
    rest += 4 * program.limits.max_logit_rows * program.vocab_size + RESERVED_BYTES
    target = replace(gpu_target("h100"), memory_bytes=weights + sequence + rest - lacking(weights, sequence))
    with pytest.raises(OptionError) as caught:
        check_memory(program, target, ONE_SEQUENCE)
    assert str(caught.value.fix).startswith(
        f"{advice}; tensor_parallel_size=2 is enough for all of it: lower max_model"
    )
    check_memory(program_of(RankLayout(2)), target, ONE_SEQUENCE)
    shorter = replace(program, limits=replace(program.limits, max_model_len=1024))
    if "1024" in advice:
        check_memory(shorter, target, ONE_SEQUENCE)
    else:
        with pytest.raises(OptionError, match="one sequence of 1024 tokens"):
            check_memory(shorter, target, ONE_SEQUENCE)
