"""The description of a Triton kernel, as data: the op that it computes, its preconditions and the ways to launch it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

import llmc.ops  # noqa: F401  (registers the ops that templates name)
from llmc.codegen.call import Call, RowsCall
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class DeviceLaunch:
    """One way to launch a node's kernel.

    function: a @triton.jit function at the top of a module, or a LibraryFunction. arguments, by the function's
    parameter names: an operand without a stride, a count, an int or a float, or None for a pointer that is absent (then
    the kernel is compiled for None). constants: the tl.constexpr parameters. grid: one to three expressions in T, L and
    R (program/launch_grid.py), such as "cdiv(T, 64) * 4". then: launches that follow, such as one that adds up what
    this one left in a workspace. sides: see Launch. min_tokens, max_tokens: the row counts (T, or L where the launch's
    rows are logit rows) that the launch serves, None for no limit; together the candidates serve every count. seconds:
    predicted for the maximum row count, for this launch and those that follow together; None if the node's cost is the
    prediction. moved: bytes, where they are others than the node's.
    """

    function: Any
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Constant]
    grid: tuple[str, ...]
    num_warps: int = 4
    num_stages: int = 3
    min_tokens: int = 1
    max_tokens: int | None = None
    then: "tuple[DeviceLaunch, ...]" = ()
    sides: tuple[str, ...] = ()
    seconds: float | None = None
    moved: str | None = None


@dataclass(frozen=True)
class LibraryFunction:
    """A function of llmc/program/library_functions.py, called as a kernel is."""

    fn: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The call; a library chooses its own grid, warps and stages."""

        def call(*, num_warps: int, num_stages: int, **arguments: Any) -> None:
            self.fn(**arguments)

        return call


@dataclass(frozen=True)
class KernelTemplate:
    """A kernel for an op. candidates: the ways to launch it for a node on a target, the predicted fastest first.

    supports: why the kernel cannot compute a node on the target, or None. in_place: a rows argument that may lie where
    a result goes (its index); the kernel then reads each element only where, and before, it writes it. normed: for a
    product, the ops that yield weights (None: dense ones) whose kernels norm x on the way, or have it normed before.
    """

    op: Any
    supports: Callable[[fx.Node, GpuTarget], Refusal | None]
    candidates: Callable[[Call, GpuTarget], tuple[DeviceLaunch, ...]]
    in_place: tuple[tuple[str, int], ...] = ()
    normed: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class RowsTemplate(KernelTemplate):
    """Template of a kernel that needs neither weights nor caches, so that it can be launched without a node."""

    candidates: Callable[[RowsCall, GpuTarget], tuple[DeviceLaunch, ...]]


def rows(name: str, operand: Operand | None) -> dict[str, Argument]:
    """`{name}_ptr` and `{name}_row_stride` (in elements) of RowsCall.rows or RowsCall.result; None and 0 for None."""
    if operand is None:
        return {f"{name}_ptr": None, f"{name}_row_stride": 0}
    return {f"{name}_ptr": operand.pointer, f"{name}_row_stride": operand.stride}


def named_arguments(
    kernel: Any, call: RowsCall, results: Sequence[str] = ("y",), /, **more: Argument
) -> dict[str, Argument]:
    """The arguments of a kernel whose pointers have the names of the op's arguments, or of its results.

    `{name}_ptr` with a `{name}_row_stride` is passed as rows, without one as a vector. more: all other arguments.
    """
    parameters = inspect.signature(kernel.fn).parameters
    arguments: dict[str, Argument] = {}
    for parameter in parameters:
        name = parameter.removesuffix("_ptr")
        if name == parameter or parameter in more:
            continue
        if f"{name}_row_stride" in parameters:
            arguments |= rows(name, call.result(results.index(name)) if name in results else call.rows(name))
        else:
            arguments[parameter] = call.vector(name)
    return arguments | more
