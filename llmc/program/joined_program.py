"""All stages of an engine as one program, for reports, sums and predictions. It is not executed."""

from collections.abc import Sequence
from dataclasses import replace

from llmc.program.program import Affine, Program


def joined_program(stages: Sequence[Program]) -> Program:
    """Join the launches, weights and caches of all stages in order, with an arena per stage; a single stage is returned
    unchanged. Weights shared by stages are repeated."""
    if len(stages) == 1:
        return stages[0]
    buffers, begun, arena = [], 0, Affine()
    for stage in stages:
        for buffer in stage.buffers:
            first, last = buffer.first_launch + begun, buffer.last_launch + begun
            name, offset = f"{buffer.name}.stage{stage.stage}", arena + buffer.offset
            buffers.append(replace(buffer, name=name, offset=offset, first_launch=first, last_launch=last))
        begun += len(stage.launches)
        arena += stage.arena
    return replace(
        stages[0],
        arena=arena,
        unplanned_arena=sum((stage.unplanned_arena for stage in stages), Affine()),
        buffers=tuple(buffers),
        weights=tuple(slot for stage in stages for slot in stage.weights),
        caches=tuple(cache for stage in stages for cache in stage.caches),
        states=tuple(state for stage in stages for state in stage.states),
        launches=tuple(launch for stage in stages for launch in stage.launches),
        side_outputs=tuple(side for stage in stages for side in stage.side_outputs),
        hands_over=0,
    )
