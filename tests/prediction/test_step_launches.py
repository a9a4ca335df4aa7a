"""A step's launches, and which of them has a node's cost."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.options import parse_options
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_launches import step_launches
from llmc.prediction.step_shape import StepShape
from llmc.program import StepOutput
from llmc.runtime.device.program import calls_of_step, plan_calls
from tests.codegen.tiny_models import llama
from tests.gpu_target import gpu_target

OPTIONS = {"max_batch_tokens": 64, "max_logit_rows": 16, "max_model_len": 64, "max_sequences": 8}


@pytest.mark.parametrize("step", [StepShape.decode(1, 40), StepShape.decode(8, 40), StepShape.prefill(33)], ids=repr)
def test_they_are_those_that_the_runtime_makes_and_have_all_costs(step: StepShape) -> None:
    program = lower_device(llama(torch.bfloat16)[0], gpu_target("h100"), parse_options(OPTIONS)).program
    counts = {"T": step.tokens, "L": step.logit_rows, "R": step.requests, "max_blocks": 4}
    found = dict(step_launches(program.launches, step, StepOutput.BEST))
    made = [call.index for call, _ in calls_of_step(plan_calls(program), counts, StepOutput.BEST)]
    assert list(found) == made
    attention = "paged_decode_kernel" if step.tokens == step.requests else "paged_prefill_kernel"
    costs = {
        program.launches[index].family
        for index, parts in found.items()
        if any(program.launches[part].family == "paged_prefill_kernel" for part in parts)
        and sum(evaluate_expression(program.launches[part].flops, step.values()) for part in parts) > 0
    }
    assert costs == {attention}
