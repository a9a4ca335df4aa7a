"""All stages of an engine as one program, for reports, sums and predictions. It is not executed."""

from collections.abc import Sequence
from dataclasses import replace

from llmc.program.program import Affine, Alternative, Launch, Origin, Program

# The family of the transfer of a stage's rows to the next stage, which is not a launch on a GPU.
HAND_OVER = "hand_over"


def joined_program(stages: Sequence[Program]) -> Program:
    """Join the launches, weights and caches of all stages in order, with an arena per stage; a single stage is returned
    unchanged. Weights shared by stages are repeated. Kernels of GPUs have their stage in their names, and a transfer of
    rows (HAND_OVER) follows each stage of GPUs except the last."""
    if len(stages) == 1:
        return stages[0]
    buffers, begun, arena = [], 0, Affine()
    launches: list[Launch] = []
    alternatives: list[Alternative] = []
    for stage in map(_named_by_stage, stages):
        for buffer in stage.buffers:
            first, last = buffer.first_launch + begun, buffer.last_launch + begun
            name, offset = f"{buffer.name}.stage{stage.stage}", arena + buffer.offset
            buffers.append(replace(buffer, name=name, offset=offset, first_launch=first, last_launch=last))
        for other in stage.alternatives:
            alternatives.append(replace(other, first=other.first + begun, last=other.last + begun))
        launches += stage.launches
        if stage.kernels and stage.hands_over:
            launches.append(_transfer(stage))
        begun = len(launches)
        arena += stage.arena
    return replace(
        stages[0],
        arena=arena,
        unplanned_arena=sum((stage.unplanned_arena for stage in stages), Affine()),
        buffers=tuple(buffers),
        weights=tuple(slot for stage in stages for slot in stage.weights),
        caches=tuple(cache for stage in stages for cache in stage.caches),
        states=tuple(state for stage in stages for state in stage.states),
        launches=tuple(launches),
        kernels=tuple(kernel for stage in map(_named_by_stage, stages) for kernel in stage.kernels),
        alternatives=tuple(alternatives),
        side_outputs=tuple(side for stage in stages for side in stage.side_outputs),
        hands_over=0,
    )


def _named_by_stage(stage: Program) -> Program:
    """The stage with names of kernels that no other stage has. A CPU's kernels are functions of one library."""
    if not stage.kernels:
        return stage

    def named(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        return tuple(replace(launch, kernel=f"{launch.kernel}.stage{stage.stage}") for launch in launches)

    return replace(
        stage,
        kernels=tuple(replace(kernel, name=f"{kernel.name}.stage{stage.stage}") for kernel in stage.kernels),
        launches=named(stage.launches),
        alternatives=tuple(replace(other, launches=named(other.launches)) for other in stage.alternatives),
    )


def _transfer(stage: Program) -> Launch:
    """The rows that a stage writes and the next one reads, in fp32."""
    origin = Origin((f"{HAND_OVER}_{stage.stage + 1}",), None, None)
    return Launch(HAND_OVER, HAND_OVER, (), {}, origin, f"{2 * 4 * stage.hands_over}*T", "0")
