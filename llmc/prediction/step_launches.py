"""The launches that a step has, and where its costs arise.

A node's cost is that of its first launch. If the step leaves that one no work, a launch that follows does it: attention
of prompts in a step of decodes, for example.
"""

from collections.abc import Iterator, Sequence

from llmc.prediction.step_shape import StepShape
from llmc.program import Launch, StepOutput
from llmc.program.launch_grid import evaluate_grid


def step_launches(
    launches: Sequence[Launch], step: StepShape, wanted: StepOutput = StepOutput.LOGITS
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The index of each launch that does something in a step, with the indices of those whose cost it has."""
    carried: list[int] = []
    for index, launch in enumerate(launches):
        if not launch.runs(tokens=step.tokens, logit_rows=step.logit_rows, wanted=wanted):
            continue
        carried.append(index)
        if not is_empty(launch, step):
            yield index, tuple(carried)
            carried.clear()


def is_empty(launch: Launch, step: StepShape) -> bool:
    """Whether the step has no program of the launch."""
    counts = {"T": step.tokens, "L": step.logit_rows, "R": step.requests, "max_blocks": 1}
    return any(evaluate_grid(text, counts) <= 0 for text in launch.grid)
