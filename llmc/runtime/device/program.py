"""A GPU program's launches, parsed once for a step loop: what each passes, where pointers lead, how many programs run.

Shared by the executors that launch binaries and that interpret the kernels' sources.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.program import (
    ITEMSIZES,
    Affine,
    DeviceKernel,
    DeviceParameter,
    Launch,
    Program,
    RowRange,
    StepOutput,
    is_for,
)
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.program.launch_grid import evaluate_grid
from llmc.program.launch_signature import dtype_of
from llmc.runtime.device.launch_check import LaunchBounds, check_kernels, launch_problem

ARENA = "arena"
# The names of an engine's rank arguments (llmc/program/rank_memory.py).
RANKS = ("engine", "ranks")


@dataclass(frozen=True)
class Pointer:
    """An address: `offset` bytes into the memory that (space, name) stands for; its elements' dtype.

    space: arena (of all buffers; name is empty), weight, cache (`3.k`), state (`2`), adapter (`lora_3_a`), input (a
    field of Step or of CHOICE_INPUTS), output (logits, CHOICE_OUTPUTS) or engine (RANKS, ARRIVALS).
    """

    space: str
    name: str
    offset: Affine
    dtype: str


@dataclass(frozen=True)
class Number:
    """A number known at build time. type: i32, i64 or fp32."""

    value: int | float
    type: str


# A count is an int32.
CallArgument = Pointer | Count | Rows | Number


@dataclass(frozen=True)
class PlannedCall:
    """A launch with its kernel; arguments in the order of kernel.parameters. index: which of the program's launches it
    is. only, wanted, sides, unless: when."""

    index: int
    kernel: DeviceKernel
    arguments: tuple[CallArgument, ...]
    grid: tuple[str, ...]
    only: RowRange | None
    wanted: tuple[StepOutput, ...]
    sides: tuple[str, ...]
    unless: tuple[str, ...]

    def runs(self, *, tokens: int, logit_rows: int, wanted: StepOutput, sides: Collection[str]) -> bool:
        """Whether a step of T tokens and L logit rows has the call. sides: the side outputs that the step needs."""
        if (self.wanted and wanted not in self.wanted) or not is_for(self.sides, self.unless, sides):
            return False
        return self.only is None or self.only.holds(tokens=tokens, logit_rows=logit_rows)

    def named_arguments(self, tensor: Callable[[Pointer], Any], counts: Mapping[str, int]) -> dict[str, Any]:
        """Return the arguments by name, for a function that takes tensors. tensor: maps a pointer to its tensor."""
        values: dict[str, Any] = {}
        for parameter, argument in zip(self.kernel.parameters, self.arguments, strict=True):
            if isinstance(argument, Pointer):
                values[parameter.name] = tensor(argument)
            else:
                values[parameter.name] = argument.value if isinstance(argument, Number) else argument.at(counts)
        return values

    def programs(self, counts: Mapping[str, int]) -> tuple[int, int, int]:
        """The grid for a step's counts; a launch with a 0 among them is left out."""
        sizes = [max(0, evaluate_grid(text, counts)) for text in self.grid]
        x, y, z = (*sizes, 1, 1)[:3]
        return x, y, z


def calls_of_step(
    calls: Sequence[PlannedCall], counts: Mapping[str, int], wanted: StepOutput, sides: Collection[str] = ()
) -> list[tuple[PlannedCall, tuple[int, int, int]]]:
    """The calls that a step with these counts has, with their grids. Layers share grids, so each is evaluated once."""
    grids: dict[tuple[str, ...], tuple[int, int, int]] = {}
    chosen = []
    for call in calls:
        if call.runs(tokens=counts["T"], logit_rows=counts["L"], wanted=wanted, sides=sides):
            grid = grids.get(call.grid) or grids.setdefault(call.grid, call.programs(counts))
            if all(grid):
                chosen.append((call, grid))
    return chosen


def plan_calls(program: Program, *, compacts: bool = False) -> tuple[PlannedCall, ...]:
    """The launches of the program's steps in order. compacts: those of steps with a compaction, which have no others.

    Raises EngineFormatError for one that names what the program does not have, or does not fit its kernel or memory.
    """
    check_kernels(program)
    kernels = {kernel.name: kernel for kernel in program.kernels}
    bounds = LaunchBounds(program)
    launches = ((index, launch) for index, launch in enumerate(program.launches) if launch.compacts == compacts)
    return tuple(_planned(index, launch, kernels, bounds) for index, launch in launches)


def _planned(index: int, launch: Launch, kernels: Mapping[str, DeviceKernel], bounds: LaunchBounds) -> PlannedCall:
    kernel = kernels.get(launch.kernel)
    if kernel is None:
        raise EngineFormatError(f"a launch names the kernel {launch.kernel!r}, which does not exist", fix=REBUILD)
    if not 1 <= len(launch.grid) <= 3:
        raise EngineFormatError(f"a launch of {kernel.name} has a grid of {len(launch.grid)} sizes", fix=REBUILD)
    problem = launch_problem(launch, kernel, bounds)
    if problem is not None:
        raise EngineFormatError(f"a launch of {kernel.name} {problem}", fix=REBUILD)
    arguments = (_argument(launch.arguments[parameter.name], parameter, bounds) for parameter in kernel.parameters)
    conditions = (launch.only, launch.wanted, launch.sides, launch.unless)
    return PlannedCall(index, kernel, tuple(arguments), launch.grid, *conditions)


def _argument(value: Argument, parameter: DeviceParameter, bounds: LaunchBounds) -> CallArgument:
    """Convert an argument of a launch that has passed the checks."""
    if isinstance(value, Operand):
        dtype = dtype_of(bounds.dtypes, value)
        offset = value.offset * ITEMSIZES[dtype]
        if value.space != "buffer":
            return Pointer(value.space, value.name, Affine(offset), dtype)
        start = bounds.buffers[value.name]
        return Pointer(ARENA, "", Affine(start.constant + offset, start.tokens, start.logit_rows), dtype)
    if isinstance(value, Count | Rows):
        return value
    assert isinstance(value, int | float), "anything else is a problem"
    return Number(value, parameter.type)
