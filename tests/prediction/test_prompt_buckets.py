"""The numbers of tokens that steps with prompts are padded to."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.options import parse_options
from llmc.prediction.prompt_buckets import MOST_TOKENS, token_buckets
from llmc.program import Program, RankLayout, RowCount, RowRange, StepOutput
from llmc.runtime.device.program import calls_of_step, plan_calls
from tests.codegen.tiny_models import llama
from tests.gpu_target import gpu_target
from tests.runtime.device import device_program

TARGET = gpu_target("h100")


def of_cost(flops: str, only: RowRange | None = None) -> Program:
    """A program of one launch with this number of operations."""
    program = device_program.program("sm_90")
    limits = replace(program.limits, max_batch_tokens=2048)
    launches = tuple(replace(launch, flops=flops, only=only) for launch in program.launches)
    return replace(program, limits=limits, launches=launches)


def test_a_step_has_the_launches_of_its_bucket() -> None:
    options = parse_options({"max_batch_tokens": 300, "max_logit_rows": 16, "max_model_len": 64, "max_sequences": 8})
    program = lower_device(llama(torch.bfloat16)[0], TARGET, options).program
    buckets, calls = token_buckets(program, TARGET), plan_calls(program)
    assert buckets[-1] == 300

    def launched(tokens: int) -> list[int]:
        counts = {"T": tokens, "L": 1, "R": 1, "max_blocks": 64}
        return [call.index for call, _ in calls_of_step(calls, counts, StepOutput.BEST)]

    for before, bucket in pairwise((1, *buckets)):
        wanted = launched(bucket)
        assert all(launched(tokens) == wanted for tokens in range(before + 1, bucket))


def test_steps_that_cost_nothing_are_padded_to_at_most_about_twice_their_tokens() -> None:
    buckets = token_buckets(of_cost("0"), TARGET)
    assert buckets[-1] == MOST_TOKENS
    assert all(larger <= 2 * smaller + 14 for smaller, larger in pairwise(buckets))
    assert len(buckets) < 10


@pytest.mark.parametrize(("microseconds", "last"), [(0.05, 640), (0.5, 64)])
def test_no_padding_takes_more_time_than_a_graph_saves(microseconds: float, last: int) -> None:
    """A launch saves 2 µs, which is 40 tokens or 4; up to 64 tokens, padding is free."""
    buckets = token_buckets(of_cost(f"{microseconds * 1e-6 * TARGET.bf16_rate}*T"), TARGET)
    assert all(larger - smaller <= 41 for smaller, larger in pairwise(buckets) if larger > 64)
    assert buckets[-1] == pytest.approx(last, abs=64)


def test_a_range_of_a_launch_ends_a_bucket() -> None:
    program = of_cost("0", RowRange(RowCount.TOKENS, 1, 37))
    assert 37 in token_buckets(program, TARGET)


def test_engines_of_ranks_and_of_whole_texts_have_none() -> None:
    program = of_cost("0")
    assert token_buckets(replace(program, layout=RankLayout(tensor=2)), TARGET) == ()
    assert token_buckets(replace(program, caches=()), TARGET) == ()
