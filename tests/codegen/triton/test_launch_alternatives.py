"""Any of an engine's alternatives can take its site: the same results, with memory planned anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.launch_alternatives import launch_alternatives, with_every_buffer
from llmc.codegen.triton.lowering import lower_device
from llmc.graph.execute import Chunk, run_steps
from llmc.options import BuildOptions
from llmc.program import Alternative, Program
from llmc.program.program_json import program_from_json, program_to_json
from tests.codegen.tiny_models import llama
from tests.codegen.triton.device_harness import interpret_steps
from tests.gpu_target import gpu_target

STEPS = ((Chunk(0, 0, (3, 1, 4, 1, 5, 9)),), (Chunk(0, 6, (2,)), Chunk(1, 0, (7,))))
OPTIONS = BuildOptions(max_batch_tokens=16, max_sequences=4, max_logit_rows=16, max_model_len=32)
H100 = gpu_target("h100")


def choices(program: Program, kernel: str) -> list[Alternative]:
    """For each site an alternative whose last kernels are of that name, where it has one."""
    by_first: dict[int, Alternative] = {}
    for alternative in program.alternatives:
        names = {launch.family for launch in alternative.launches}
        if kernel in names:
            by_first.setdefault(alternative.first, alternative)
    return list(by_first.values())


@pytest.mark.parametrize(
    "kernel",
    [
        "matmul",
        "finish_product_kernel",
        pytest.param("narrow_kernel", marks=pytest.mark.slow),
        pytest.param("norm_kernel", marks=pytest.mark.slow),
    ],
)
def test_alternatives_give_the_same_logits(kernel: str, tmp_path: Path) -> None:
    graph, source = llama(torch.float32, layers=2)
    lowered = lower_device(graph, H100, OPTIONS)
    chosen = choices(lowered.program, kernel)
    assert chosen
    changed = launch_alternatives(lowered.program, chosen)
    used, before = ([launch.kernel for launch in p.launches] for p in (changed, lowered.program))
    wanted = [launch.kernel for alternative in chosen for launch in alternative.launches]
    assert set(wanted) <= set(used)
    # Each choice is one for both layers, lm_head's aside.
    assert sum(name in wanted for name in used) > sum(name in wanted for name in before) + len(chosen)
    assert program_from_json(program_to_json(changed), Path("p")) == changed
    got = interpret_steps(replace(lowered, programs={"h100": changed}), source, STEPS, tmp_path)
    for ours, theirs in zip(got, run_steps(graph, source, STEPS), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.std()


def test_what_was_replaced_can_come_back() -> None:
    program = lower_device(llama(torch.float32)[0], H100, OPTIONS).program
    chosen = choices(program, "matmul")
    changed = launch_alternatives(program, chosen)
    assert len(changed.alternatives) == len(program.alternatives)
    old = {launch.kernel for a in chosen for launch in program.launches[a.first : a.last + 1]}
    back = [
        a
        for a in changed.alternatives
        if {x.kernel for x in a.launches} <= old
        and "matmul" in " ".join(x.kernel for x in changed.launches[a.first : a.last + 1])
    ]
    again = launch_alternatives(changed, list({a.first: a for a in back}.values()))
    assert [x.kernel for x in again.launches] == [x.kernel for x in program.launches]
    assert {b.name for b in again.buffers} == {b.name for b in program.buffers}


def test_a_program_for_measuring_has_room_for_all() -> None:
    program = lower_device(llama(torch.float32)[0], H100, OPTIONS).program
    measured = with_every_buffer(program)
    names = {b.name for b in measured.buffers}
    assert names >= {b.name for b in program.buffers} | {b.name for a in program.alternatives for b in a.buffers}
    assert measured.arena.at(tokens=16, logit_rows=16) >= program.arena.at(tokens=16, logit_rows=16)
