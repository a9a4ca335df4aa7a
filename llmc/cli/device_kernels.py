"""What `llmc inspect` shows of a GPU engine: every kernel's resources, and what a step should take on each target."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rich.table import Table

from llmc.cli.units import in_bytes, in_seconds
from llmc.codegen.triton.launch_seconds import SECONDS_PER_LAUNCH, launch_seconds
from llmc.graph.cost import StepShape
from llmc.graph.cost_expression import evaluate_expression
from llmc.grid import evaluate_grid
from llmc.program import Launch, Program, Wanted
from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Prediction:
    """A step on a target: seconds and bytes of each kernel, over its launches."""

    seconds: dict[str, float]
    moved: dict[str, float]
    launches: int
    flops: float


def predict(program: Program, target: GpuTarget, step: StepShape) -> Prediction:
    """The roofline of a greedy step, launch by launch; nothing was measured."""
    seconds, moved = defaultdict[str, float](float), defaultdict[str, float](float)
    values, flops, count, carried = step.values(), 0.0, 0, list[Launch]()
    for launch in program.launches:
        if not launch.runs(tokens=step.tokens, logit_rows=step.logit_rows, wanted=Wanted.BEST):
            continue
        carried.append(launch)
        if _is_empty(launch, step):
            continue  # Its node's work is done by one of the launches that follow.
        count += 1
        for each in carried:
            start = SECONDS_PER_LAUNCH if each is not launch else 0.0
            seconds[launch.kernel] += launch_seconds(each, step, target, program.limits) - start
            moved[launch.kernel] += evaluate_expression(each.bytes_moved, values)
            flops += evaluate_expression(each.flops, values)
        carried.clear()
    return Prediction(dict(seconds), dict(moved), count, flops)


def device_kernels(program: Program, target: GpuTarget, step: StepShape, what: str) -> Table:
    """A row for each kernel. what: the step, in words."""
    found = predict(program, target, step)
    total, moved = sum(found.seconds.values()), sum(found.moved.values())
    share, rate = moved / total / target.bandwidth, found.flops / total / target.bf16_rate
    title = (
        f"{what} on {target.name}, predicted and not measured: {in_seconds(total)} in {found.launches} launches, "
        f"{in_bytes(moved)} ({share:.0%} of {target.bandwidth / 1e12:.2f} TB/s), {found.flops / 1e12:.3g} TFLOP "
        f"({rate:.0%} of the matrix peak)"
    )
    table = Table(title=title, title_justify="left")
    for column in ("kernel", "for", "threads", "registers", "spills", "shared", "bytes", "predicted"):
        table.add_column(column, justify="left" if column in ("kernel", "for") else "right", overflow="fold")
    launched = {launch.kernel for launch in program.launches}
    for kernel in program.kernels:
        predicted = in_seconds(found.seconds[kernel.name]) if kernel.name in found.seconds else "other steps"
        costs = in_bytes(found.moved.get(kernel.name, 0.0)), predicted
        if kernel.is_library and kernel.name in launched:
            table.add_row(kernel.name, "library", "", "", "", "", *costs)
        for arch, binary in kernel.binaries.items():
            sizes = (binary.threads, binary.registers, binary.spill_bytes)
            table.add_row(kernel.name, arch, *map(str, sizes), in_bytes(binary.shared_bytes), *costs)
    return table


def candidates(program: Program, target: GpuTarget) -> Table:
    """Each choice among ways to compute one node, alike ones once: predicted times, the chosen one first."""
    table = Table(title=f"choices for {target.name}; `llmc tune` measures them", title_justify="left")
    for column in ("for", "rows", "chosen", "predicted", "others"):
        table.add_column(column, justify="right" if column == "predicted" else "left", overflow="fold")
    sites: dict[tuple[int, int], list[Launch]] = defaultdict(list)
    for alternative in program.alternatives:
        sites[alternative.first, alternative.last].append(_leader(alternative.launches))
    for (first, last), others in sites.items():
        chosen = _leader(program.launches[first : last + 1])
        only = chosen.only
        rows = "all" if only is None else f"{only.rows.value} {only.first} to {only.last or 'the most'}"
        named = [f"{x.kernel} {in_seconds(x.seconds)}" for x in others if x.seconds is not None]
        predicted = "" if chosen.seconds is None else in_seconds(chosen.seconds)
        table.add_row(", ".join(chosen.origin.nodes), rows, chosen.kernel, predicted, ", ".join(named))
    return table


def _leader(launches: tuple[Launch, ...]) -> Launch:
    """The launch that does the work, which has the predicted time of all."""
    return next((launch for launch in launches if launch.seconds is not None), launches[0])


def _is_empty(launch: Launch, step: StepShape) -> bool:
    """Whether the step has no program of the launch."""
    counts = {"T": step.tokens, "L": step.logit_rows, "R": step.requests, "max_blocks": 1}
    return any(evaluate_grid(text, counts) <= 0 for text in launch.grid)
