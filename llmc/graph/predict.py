"""Predict how long a launch takes from its cost and from what the machine was measured to deliver.

    seconds = launch + packed / pack + max(bytes / bandwidth, flops / multiply) + serial · min(of the same two)

The roofline (Williams, Waterman and Patterson 2009) is serial = 0: transfer and arithmetic hide each other fully. On
a CPU they do not, because loads of operands in cache and from memory share the same units (the ECM model: Treibig and
Hager 2010), so `serial` is measured. `packed`: elements of x that a CPU's matrix product brings into its own order
before it multiplies. No number here is fitted to a model's measured steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmc.graph.cost import StepShape
from llmc.graph.cost_expression import evaluate_expression
from llmc.program import DeviceKernel, Launch, Program
from llmc.targets import GpuTarget

_SUFFIX = re.compile(r"^llmc_.*?_(f32|bf16)")


@dataclass(frozen=True)
class Rates:
    """What a machine delivers.

    bandwidth: bytes a second. multiply: FLOP a second of products, by safetensors dtype. pack: elements a second;
    None where nothing is packed. launch: seconds. serial: 0 to 1, the part of the shorter of transfer and arithmetic
    that the longer does not hide. measured: on this machine, not from a data sheet.
    """

    bandwidth: float
    multiply: dict[str, float]
    pack: float | None
    launch: float
    serial: float
    measured: bool


@dataclass(frozen=True)
class LaunchCost:
    """A launch's cost as expressions of a step's symbols (graph/cost.py). dtype: whose products' rate applies."""

    bytes_moved: str
    flops: str
    packed: str
    dtype: str


def gpu_rates(target: GpuTarget) -> Rates:
    """The data sheet's; a launch costs nothing, since decode steps run as graphs."""
    multiply = {dtype: target.rate(dtype) for dtype in ("F32", "F16", "BF16")}
    return Rates(target.bandwidth, multiply, None, 0.0, 0.0, measured=False)


def launch_costs(program: Program) -> tuple[LaunchCost, ...]:
    """The cost of each of the program's launches."""
    kernels = {kernel.name: kernel for kernel in program.kernels}
    return tuple(
        LaunchCost(launch.bytes_moved, launch.flops, _packed(launch), _dtype(launch, kernels))
        for launch in program.launches
    )


def predict_launch(cost: LaunchCost, step: StepShape, rates: Rates) -> float:
    """Seconds of a launch in a step of that shape."""
    values = step.values()
    transfer = evaluate_expression(cost.bytes_moved, values) / rates.bandwidth
    # A machine whose rate for a dtype nobody measured is taken to be as fast as for any.
    rate = rates.multiply.get(cost.dtype, max(rates.multiply.values()))
    arithmetic = evaluate_expression(cost.flops, values) / rate
    packing = 0.0 if rates.pack is None else evaluate_expression(cost.packed, values) / rates.pack
    shorter, longer = sorted((transfer, arithmetic))
    return rates.launch + packing + longer + rates.serial * shorter


def predict_step(program: Program, step: StepShape, rates: Rates) -> float:
    """Seconds of the step's launches together."""
    pairs: Iterable[tuple[Launch, LaunchCost]] = zip(program.launches, launch_costs(program), strict=True)
    return sum(
        predict_launch(cost, step, rates)
        for launch, cost in pairs
        if launch.runs(tokens=step.tokens, logit_rows=step.logit_rows)
    )


def _packed(launch: Launch) -> str:
    """Products of CPU engines are the launches that have an `in`."""
    channels, rows = launch.arguments.get("in"), launch.arguments.get("tokens")
    return "0" if channels is None or launch.grid else f"{channels}*{rows}"


def _dtype(launch: Launch, kernels: Mapping[str, DeviceKernel]) -> str:
    """BF16 or F16 where a kernel reads such elements, else F32. Of a C++ kernel the first suffix is its operands'."""
    kernel = kernels.get(launch.kernel)
    if kernel is None:
        suffix = _SUFFIX.search(launch.kernel)
        return "BF16" if suffix is not None and suffix[1] == "bf16" else "F32"
    types = {parameter.type for parameter in kernel.parameters}
    return next((dtype for text, dtype in (("*bf16", "BF16"), ("*fp16", "F16")) if text in types), "F32")
