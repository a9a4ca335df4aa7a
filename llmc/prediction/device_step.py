"""The predicted time of a GPU engine's step, only from the target's table: the sum over its launches."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.plural import counted
from llmc.prediction.collectives import collective_seconds, is_collective
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.hand_over import hand_over_seconds
from llmc.prediction.launch_seconds import launch_seconds
from llmc.prediction.step_launches import step_launches
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch, Limits, Program, StepOutput
from llmc.program.joined_program import HAND_OVER
from llmc.targets import GpuTarget


@dataclass(frozen=True)
class StepPrediction:
    """The predicted cost of a step on a target. Nothing is measured.

    Attributes:
        target: The target's name.
        step: A description of the step.
        seconds: Time of all launches; bytes_moved and flops are also totals.
        launches: Number of launches that do something.
        kernel_seconds: Time by kernel, and so are kernel_bytes and kernel_launches.
        bandwidth_share: Share of the target's memory bandwidth.
        peak_share: Share of the target's bf16 operations per second.
    """

    target: str
    step: str
    seconds: float
    bytes_moved: float
    flops: float
    launches: int
    kernel_seconds: Mapping[str, float]
    kernel_bytes: Mapping[str, float]
    kernel_launches: Mapping[str, int]
    bandwidth_share: float
    peak_share: float

    def __str__(self) -> str:
        return (
            f"{self.step} on {self.target}, predicted and not measured: {self.seconds * 1e3:.3g} ms in "
            f"{counted(self.launches, 'launch')}, {self.bytes_moved / 1e9:.3g} GB ({self.bandwidth_share:.0%} of the "
            f"bandwidth), "
            f"{self.flops / 1e12:.3g} TFLOP ({self.peak_share:.0%} of the matrix peak)"
        )


def usual_context(limits: Limits) -> int:
    """Default number of cached positions of the decode step whose costs are shown."""
    return min(1024, limits.max_model_len)


def predict_decode(program: Program, target: GpuTarget, requests: int, context: int) -> StepPrediction:
    """Predict a decode step of `requests` requests with one token each, and `context` cached positions each."""
    title = f"decode, batch {requests}, context {context}"
    return _predict(program, target, StepShape.decode(requests=requests, context=context), title)


def predict_prefill(program: Program, target: GpuTarget, tokens: int) -> StepPrediction:
    """Predict a prompt of `tokens` tokens in one step."""
    return _predict(program, target, StepShape.prefill(tokens), f"prefill of {counted(tokens, 'token')}")


def _predict(program: Program, target: GpuTarget, step: StepShape, what: str) -> StepPrediction:
    """The roofline of a greedy step, launch by launch."""
    seconds, moved, launches = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    values, flops = step.values(), 0.0
    for index, parts in step_launches(program.launches, step, StepOutput.BEST):
        kernel = program.launches[index].kernel
        launches[kernel] += 1
        for each in parts:
            part, start = program.launches[each], target.launch if each != index else 0.0
            seconds[kernel] += _seconds(part, step, target, program) - start
            moved[kernel] += evaluate_expression(part.bytes_moved, values)
            flops += evaluate_expression(part.flops, values)
    total, transferred = sum(seconds.values()), sum(moved.values())
    return StepPrediction(
        target=target.name,
        step=what,
        seconds=total,
        bytes_moved=transferred,
        flops=flops,
        launches=launches.total(),
        kernel_seconds=dict(seconds),
        kernel_bytes=dict(moved),
        kernel_launches=dict(launches),
        bandwidth_share=transferred / total / target.bandwidth,
        peak_share=flops / total / target.bf16_rate,
    )


def _seconds(launch: Launch, step: StepShape, target: GpuTarget, program: Program) -> float:
    ranks = program.ranks
    if launch.family == HAND_OVER:
        return hand_over_seconds(evaluate_expression(launch.bytes_moved, step.values()) / 2)
    if is_collective(launch):
        return target.launch + collective_seconds(launch, step, ranks, target.links.of(program.layout.ranks))
    return launch_seconds(launch, step, target, program.limits)
