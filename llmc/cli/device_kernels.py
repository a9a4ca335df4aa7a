"""The output of `llmc inspect` for a GPU engine: each kernel's resources, and the predicted step time per target."""

from collections import defaultdict

from llmc.cli.table import Column, FittingTable, numeric
from llmc.cli.units import in_bytes, in_rate, in_seconds
from llmc.plural import counted
from llmc.prediction.device_step import StepPrediction
from llmc.program import Launch, Program
from llmc.program.joined_program import HAND_OVER
from llmc.targets import GpuTarget


def device_kernels(program: Program, target: GpuTarget, prediction: StepPrediction) -> FittingTable:
    """A row for each kernel. prediction: the prediction for a step of the program on the target."""
    title = (
        f"{prediction.step} on {target.name}, predicted and not measured: {in_seconds(prediction.seconds)} in "
        f"{counted(prediction.launches, 'launch')}, {in_bytes(prediction.bytes_moved)} "
        f"({prediction.bandwidth_share:.0%} of {in_rate(target.bandwidth)}), "
        f"{prediction.flops / 1e12:.3g} TFLOP ({prediction.peak_share:.0%} of the matrix peak)"
    )
    figures = numeric(("threads", 6), ("registers", 2), ("spills", 1), ("shared", 3), ("bytes", 4), "predicted")
    table = FittingTable(title, (Column("kernel"), Column("for", rank=5), *figures))
    launched = {launch.kernel for launch in program.launches}
    for kernel in program.kernels:
        seconds = prediction.kernel_seconds.get(kernel.name)
        predicted = "other steps" if seconds is None else in_seconds(seconds)
        costs = in_bytes(prediction.kernel_bytes.get(kernel.name, 0.0)), predicted
        if kernel.is_library and kernel.name in launched:
            table.add_row(kernel.name, "library", "", "", "", "", *costs)
        for arch, binary in kernel.binaries.items():
            sizes = (binary.threads, binary.registers, binary.spill_bytes)
            table.add_row(kernel.name, arch, *map(str, sizes), in_bytes(binary.shared_bytes), *costs)
    if HAND_OVER in launched:
        moved, seconds = prediction.kernel_bytes[HAND_OVER], prediction.kernel_seconds[HAND_OVER]
        table.add_row(HAND_OVER, "host", "", "", "", "", in_bytes(moved), in_seconds(seconds))
    return table


def candidates(program: Program, target: GpuTarget) -> FittingTable:
    """The alternatives for each node with their predicted times, the chosen one first; identical choices are shown
    once."""
    columns = (
        Column("for", rank=3, wraps=True),
        Column("rows", rank=1),
        Column("chosen"),
        Column("predicted", right=True),
        Column("others", rank=2, wraps=True),
    )
    table = FittingTable(f"choices for {target.name}; `llmc tune` measures them", columns)
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
    """The launch that does the work; its predicted time includes the others."""
    return next((launch for launch in launches if launch.seconds is not None), launches[0])
