"""Programs of pipeline stages for GPUs: what each stage has, and that together they compute what the model does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.lowering import lower_device
from llmc.errors import OptionError
from llmc.graph.execute import Chunk
from llmc.graph.stages import stage_graphs
from llmc.options import parse_options
from llmc.passes.pipeline import fusion, parallel, serving
from llmc.passes.runner import run_pipeline
from llmc.prediction.device_step import predict_decode
from llmc.prediction.hand_over import hand_over_seconds
from llmc.program import CHOICE_OUTPUTS, HIDDEN, Program, RankLayout
from llmc.program.joined_program import HAND_OVER, joined_program
from llmc.program.launch_arguments import Operand
from llmc.program.step_result import largest_result
from llmc.runtime.device.memory import memory_of_blocks
from llmc.runtime.device.program import plan_calls
from tests.codegen.triton.device_harness import interpreter, step_arrays
from tests.gpu_target import gpu_target
from tests.graph_builder import TensorSource, llama

LIMITS = {"max_batch_tokens": 32, "max_logit_rows": 16, "max_model_len": 64, "max_sequences": 4}
CHANNELS = 8


def lowered_stages(stages: int, *, layers: int = 2, **more: int) -> tuple[list[DeviceLowered], TensorSource]:
    """The stages of a small llama for an H100."""
    graph, source = llama(layers=layers)
    options = parse_options({**LIMITS, "pipeline_parallel_size": stages, **more})
    cut = run_pipeline(graph, (*parallel(), *serving(), *fusion()), options).graph
    return [lower_device(stage, gpu_target("h100"), options) for stage in stage_graphs(cut)], source


def operands(program: Program, space: str) -> set[str]:
    """The names in a space that launches touch."""
    values = (value for launch in program.launches for value in launch.arguments.values())
    return {value.name for value in values if isinstance(value, Operand) and value.space == space}


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_the_last_stage_chooses_tokens(ranks: int) -> None:
    lowered, _ = lowered_stages(3, layers=3, tensor_parallel_size=ranks)
    programs = [stage.program for stage in lowered]
    assert [program.layout for program in programs] == [RankLayout(ranks, 3)] * 3
    for before, program in pairwise(programs):
        width = before.hands_over
        assert (width, program.hidden_width) == (CHANNELS, CHANNELS)
        assert largest_result(before) == (LIMITS["max_batch_tokens"], width)
        assert memory_of_blocks(before, 1).logits == 4 * LIMITS["max_batch_tokens"] * width
        assert not operands(before, "output") & CHOICE_OUTPUTS.keys()
        assert HIDDEN in operands(program, "input")
    assert operands(programs[-1], "output") >= CHOICE_OUTPUTS.keys()
    assert largest_result(programs[-1]) == (LIMITS["max_logit_rows"], programs[-1].vocab_size)
    for program in programs:
        assert plan_calls(program), "every launch stays within its memory"


def test_each_stage_has_files_in_its_folder() -> None:
    """The first one's are at the root, where those of an engine with one stage are."""
    lowered, _ = lowered_stages(2)
    for stage, folder in zip(lowered, ("", "stages/1/"), strict=True):
        sources = {kernel.source for kernel in stage.program.kernels if not kernel.is_library}
        assert sources and sources <= stage.sources.keys()
        assert all(name.startswith(f"{folder}kernels/") for name in stage.sources)
        assert stage.graph_text is None
    (alone,), _ = lowered_stages(1)
    assert alone.folder == "" and alone.graph_text is not None


def test_stages_compute_the_bits_of_the_whole_model(tmp_path: Path) -> None:
    """A prompt, then a step that decodes one request while another begins."""
    steps = ([Chunk(0, 0, (3, 1, 4, 1, 5))], [Chunk(0, 5, (9,)), Chunk(1, 0, (2, 6, 5))])
    (whole,), source = lowered_stages(1)
    stages, _ = lowered_stages(2)
    alone = interpreter(whole, source, 8, tmp_path / "whole")
    first, last = (interpreter(stage, source, 8, tmp_path / "stages") for stage in stages)
    for chunks in steps:
        step = step_arrays(chunks, whole.program.limits.block_size, 4)
        rows = first.step(step).copy()
        assert rows.shape == (len(step.input_ids), CHANNELS)
        assert np.array_equal(last.step(replace(step, hidden=rows)), alone.step(step))


def test_predictions_join_the_stages() -> None:
    """A step takes as long as those of all stages, and the transfers of rows between them."""
    lowered, _ = lowered_stages(3, layers=3)
    programs, target = [stage.program for stage in lowered], gpu_target("h100")
    joined = joined_program(programs)
    names = [kernel.name for kernel in joined.kernels]
    assert len(set(names)) == len(names) == sum(len(program.kernels) for program in programs)
    assert {launch.kernel for launch in joined.launches} - {*names} == {HAND_OVER}
    for alternative in joined.alternatives:
        replaced = joined.launches[alternative.first : alternative.last + 1]
        assert {launch.origin for launch in alternative.launches} == {launch.origin for launch in replaced}
    whole = predict_decode(joined, target, 2, 32)
    parts = sum(predict_decode(program, target, 2, 32).seconds for program in programs)
    transfer = hand_over_seconds(2 * 4 * CHANNELS)
    assert whole.kernel_seconds[HAND_OVER] == pytest.approx(2 * transfer)
    assert whole.seconds == pytest.approx(parts + 2 * transfer)


def test_memory_is_checked_for_each_stage() -> None:
    """A stage that does not fit is refused by its own sum."""
    from llmc.codegen.triton.memory_fit import check_memory

    (first, last), _ = lowered_stages(2)
    small = replace(gpu_target("h100"), memory_bytes=1 << 30)
    for stage in (first, last):
        with pytest.raises(OptionError, match=rf"stage {stage.program.stage} of the engine needs .* h100 has 1\.07 GB"):
            check_memory(stage.program, small, parse_options(LIMITS))
