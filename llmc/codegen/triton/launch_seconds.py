"""How long a launch should take on a GPU: what its choice predicted, or else the roofline of bytes and operations."""

from __future__ import annotations

from llmc.graph.cost import StepShape
from llmc.graph.cost_expression import evaluate_expression
from llmc.program import Launch
from llmc.targets import GpuTarget

# What a launch adds between two others of a CUDA graph.
SECONDS_PER_LAUNCH = 2e-6


def launch_seconds(launch: Launch, step: StepShape, target: GpuTarget) -> float:
    """Seconds of one launch, its start included. What was predicted holds for the most rows that the launch serves."""
    values = step.values()
    transfer = evaluate_expression(launch.bytes_moved, values) / target.bandwidth
    roofline = max(transfer, evaluate_expression(launch.flops, values) / target.bf16_rate)
    if launch.seconds is None:
        return roofline + SECONDS_PER_LAUNCH
    return max(roofline, launch.seconds) + SECONDS_PER_LAUNCH
