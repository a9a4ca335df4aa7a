"""A GPU program's launches, parsed once for a step loop: what each passes, where pointers lead, how many programs run.

Shared by the executors that launch binaries and that interpret the kernels' sources.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.program import (
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    ITEMSIZES,
    STEP_INPUTS,
    Affine,
    DeviceKernel,
    Launch,
    Program,
    RowRange,
    StepOutput,
    is_for,
)
from llmc.program.launch_arguments import Count, Operand, Rows
from llmc.program.launch_grid import evaluate_grid
from llmc.runtime.device.launch_check import LaunchBounds, check_kernels, launch_problem

ARENA = "arena"
# What is said of an engine's ranks (llmc/program/rank_memory.py).
RANKS = ("engine", "ranks")


@dataclass(frozen=True)
class Pointer:
    """An address: `offset` bytes into the memory that (space, name) stands for; its elements' dtype.

    space: arena (of all buffers; name is empty), weight, cache (`3.k`), state (`2`), adapter (`lora_3_a`), input (a
    field of Step or of CHOICE_INPUTS), output (logits, CHOICE_OUTPUTS) or engine (RANKS).
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
    """A launch with its kernel; arguments in the order of kernel.parameters. only, wanted, sides, unless: when."""

    kernel: DeviceKernel
    arguments: tuple[CallArgument, ...]
    grid: tuple[str, ...]
    only: RowRange | None
    wanted: tuple[StepOutput, ...] = ()
    sides: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def runs(self, *, tokens: int, logit_rows: int, wanted: StepOutput, sides: Collection[str]) -> bool:
        """Whether a step of T tokens and L logit rows has the call. sides: the side outputs that it wants."""
        if (self.wanted and wanted not in self.wanted) or not is_for(self.sides, self.unless, sides):
            return False
        return self.only is None or self.only.holds(tokens=tokens, logit_rows=logit_rows)

    def named_arguments(self, tensor: Callable[[Pointer], Any], counts: Mapping[str, int]) -> dict[str, Any]:
        """By name, for a function that takes tensors. tensor: where a pointer leads."""
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
    found = []
    for call in calls:
        if call.runs(tokens=counts["T"], logit_rows=counts["L"], wanted=wanted, sides=sides):
            grid = grids.get(call.grid) or grids.setdefault(call.grid, call.programs(counts))
            if all(grid):
                found.append((call, grid))
    return found


def plan_calls(program: Program) -> tuple[PlannedCall, ...]:
    """The program's launches in order.

    Raises EngineFormatError for one that names what the program does not have, or does not fit its kernel or memory.
    """
    check_kernels(program)
    kernels = {kernel.name: kernel for kernel in program.kernels}
    memory, bounds = _Memory(program), LaunchBounds(program)
    return tuple(_planned(launch, kernels, memory, bounds) for launch in program.launches)


def _planned(
    launch: Launch, kernels: Mapping[str, DeviceKernel], memory: "_Memory", bounds: LaunchBounds
) -> PlannedCall:
    kernel = kernels.get(launch.kernel)
    if kernel is None:
        raise EngineFormatError(f"a launch names the kernel {launch.kernel!r}, which is not there", fix=REBUILD)
    if not 1 <= len(launch.grid) <= 3:
        raise EngineFormatError(f"a launch of {kernel.name} has a grid of {len(launch.grid)} sizes", fix=REBUILD)
    problem = launch_problem(launch, kernel, bounds)
    if problem is not None:
        raise EngineFormatError(f"a launch of {kernel.name} {problem}", fix=REBUILD)
    arguments = []
    for parameter in kernel.parameters:
        value = launch.arguments.get(parameter.name)
        if isinstance(value, Operand):
            argument: CallArgument = memory.pointer(value)
        elif isinstance(value, Count | Rows):
            argument = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            argument = Number(value, parameter.type)
        else:
            raise EngineFormatError(f"a launch of {kernel.name} has no {parameter.name}", fix=REBUILD)
        arguments.append(argument)
    return PlannedCall(kernel, tuple(arguments), launch.grid, launch.only, launch.wanted, launch.sides, launch.unless)


class _Memory:
    """Where the program's operands lie."""

    def __init__(self, program: Program) -> None:
        self._buffers = {buffer.name: buffer for buffer in program.buffers}
        self._weights = {slot.name: slot for slot in program.weights}
        self._caches = program.cache_names()
        self._states = program.state_names()
        self._ranks = program.ranks
        self._pools = {} if program.adapters is None else program.adapters.dtypes()

    def pointer(self, operand: Operand) -> Pointer:
        space, name = operand.space, operand.name
        if space == "buffer" and name in self._buffers:
            buffer = self._buffers[name]
            start, extra = buffer.offset, operand.offset * ITEMSIZES[buffer.dtype]
            return Pointer(ARENA, "", Affine(start.constant + extra, start.tokens, start.logit_rows), buffer.dtype)
        if space == "weight" and name in self._weights:
            return self._at(operand, self._weights[name].dtype)
        if space == "cache" and name in self._caches:
            return self._at(operand, self._caches[name].dtype)
        if space == "state" and name in self._states:
            return self._at(operand, "F32")
        if space == "adapter" and name in self._pools:
            return self._at(operand, self._pools[name])
        if space == "input":
            return self._at(operand, (STEP_INPUTS | CHOICE_INPUTS).get(name, "I32"))
        if space == "output":
            return self._at(operand, CHOICE_OUTPUTS.get(name, "F32"))
        if (space, name) == RANKS and self._ranks > 1:
            return self._at(operand, "I64")
        raise EngineFormatError(f"a launch names {operand}, which the program does not have", fix=REBUILD)

    def _at(self, operand: Operand, dtype: str) -> Pointer:
        return Pointer(operand.space, operand.name, Affine(operand.offset * ITEMSIZES[dtype]), dtype)
