"""Which decodes rotate and write their own tokens' rows, and that a step with them has the bits of one without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.execute import Chunk
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions, parse_options
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program import Launch, Program, StepOutput
from llmc.runtime.device.call_selection import CallSelection
from llmc.runtime.device.program import plan_calls
from tests.codegen.tiny_models import gemma2, gpt2, llama
from tests.codegen.triton.device_harness import interpret_steps
from tests.gpu_target import gpu_target
from tests.tiny_models import tiny_checkpoint

Model = Callable[[torch.dtype], tuple[ModelGraph, MemorySource]]

H100 = gpu_target("h100")
PROMPTS = (Chunk(0, 0, (3, 1, 4, 1, 5, 9, 2)), Chunk(1, 0, (2, 7)))
DECODES = ((Chunk(0, 7, (6,)), Chunk(1, 2, (8,))), (Chunk(0, 8, (5,)), Chunk(1, 3, (3,))))


@pytest.mark.parametrize("model", [llama, gemma2])
def test_its_steps_have_the_bits_of_rotations_of_their_own(model: Model, tmp_path: Path) -> None:
    graph, source = model(torch.float32)
    lowered = lower_device(graph, H100, BuildOptions())
    got = [
        interpret_steps(each, source, (PROMPTS, *DECODES), tmp_path)[1:] for each in (lowered, _with_rotations(lowered))
    ]
    for step, same in zip(*got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, same, strict=True))


def test_a_decode_has_five_launches_a_layer(tmp_path: Path) -> None:
    """Products of q, k and v, attention, its projection, gates, and the projection down."""
    options = parse_options({"max_batch_tokens": 64, "max_model_len": 256, "dtype": "bfloat16"})
    captured = capture(tiny_checkpoint("llama", tmp_path), options)
    program = lower_device(run_pipeline(captured.graph, default(), options).graph, H100, options).program
    before, product = ["rope_angles_kernel", "gather_rows_kernel"], "gemv_kernel"
    layer = [product, "paged_decode_kernel", *[product] * 3]
    assert _functions(program, 1, 1)[:7] == before + layer


def test_steps_have_either_form() -> None:
    program = lower_device(llama(torch.float32)[0], H100, BuildOptions()).program
    layers = len(program.caches)
    for tokens, requests, rotations in ((3, 3, 0), (4, 3, layers), (9, 1, layers), (1, 1, 0)):
        functions = _functions(program, tokens, requests)
        assert functions.count("rope_kv_write_kernel") == rotations
        assert functions.count("paged_decode_kernel") == layers


def test_more_requests_than_tokens_of_a_step_are_allowed() -> None:
    """A grid says nothing of steps that cannot be."""
    options = BuildOptions(max_batch_tokens=64, max_sequences=512)
    program = lower_device(llama(torch.float32)[0], H100, options).program
    assert plan_calls(program)


def test_models_without_rotation_are_unchanged() -> None:
    program = lower_device(gpt2(torch.float32)[0], H100, BuildOptions()).program
    assert all("T - R, 0" not in size for launch in program.launches for size in launch.grid)


def _functions(program: Program, tokens: int, requests: int) -> list[str]:
    """The functions that a step launches."""
    calls = plan_calls(program)
    counts = {"T": tokens, "L": requests, "R": requests, "max_blocks": 4}
    return [calls[i].kernel.function for i, _ in CallSelection(calls).of_step(counts, StepOutput.LOGITS)]


def _with_rotations(lowered: DeviceLowered) -> DeviceLowered:
    """The same, as if each step had a request with several tokens."""
    program = lowered.program

    def grid(launch: Launch) -> tuple[str, ...]:
        return tuple(size.replace("max(T - R, 0)", "T").replace("(T - R)", "T") for size in launch.grid)

    launches = tuple(replace(launch, grid=grid(launch)) for launch in program.launches)
    return replace(lowered, programs={"h100": replace(program, launches=launches)})
