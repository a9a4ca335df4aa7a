"""The Triton kernels, through the interface that lowering uses; records each use, so that kernels can be
specialized."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from llmc.codegen.backend import KernelCall, no_kernel
from llmc.codegen.call import Call
from llmc.codegen.kernel_ir import Loop
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, LibraryFunction
from llmc.codegen.triton.kernel_table import KERNELS
from llmc.codegen.triton.mask_rows import mask_nbytes
from llmc.codegen.triton.norm_claims import taken_in
from llmc.codegen.triton.printer import loop_grid, loop_tile, needs_rows
from llmc.errors import LoweringError
from llmc.graph.refusal import Refusal
from llmc.program import LIBRARY, LOOP, Layout, RowCount, RowRange
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Unspecialized:
    """A kernel without the types of its parameters.

    module: where `function` is; None for a generated loop, LIBRARY for a library's.
    """

    function: str
    module: str | None
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int


class TritonBackend:
    """Calls of the Triton kernel table and of generated loops, for one lowering. kernels: by the name in the calls."""

    float_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    has_panels = False
    has_free_rows = False

    def __init__(self, target: GpuTarget) -> None:
        self._target = target
        self.kernels: dict[str, Unspecialized] = {}
        self._names: dict[Unspecialized, str] = {}

    def refusal(self, node: fx.Node) -> Refusal | None:
        template = KERNELS.get(node.target)
        if template is None:
            return no_kernel(node, self._target.name, "triton")
        return template.supports(node, self._target)

    def taken_in(self, node: fx.Node) -> fx.Node | Refusal | None:
        return taken_in(node)

    def in_place(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        template = KERNELS.get(node.target)
        return template.in_place if template is not None else ()

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        candidates = [
            candidate for c in KERNELS[node.target].candidates(call, self._target) for candidate in _of_counts(c)
        ]
        return tuple(
            self._group(first, only, tuple(self._group(other, only, ()) for other in others))
            for first, only, others in alternatives(candidates)
        )

    def nbytes(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> int:
        if layout.code_bits is not None:
            return shape[0] * row_bytes(shape[1], layout)
        if layout in (Layout.MASK_ROWS, Layout.MASK_STARTS):
            return mask_nbytes(shape, layout)
        return math.prod(shape) * (4 if layout is Layout.VECTOR_F32 else dtype.itemsize)

    def panels_nbytes(
        self, shape: tuple[int, ...], scales: torch.Tensor, has_zeros: bool, format: str, layout: Layout
    ) -> int:
        raise LoweringError(f"{self._target.name} keeps codes in rows", at=f"layout {layout.value}")

    def sparse_nbytes(
        self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, count: int, scales: torch.Tensor | None
    ) -> int:
        raise LoweringError(
            f"{self._target.name} stores the masks of sparse weights in rows only", at=f"layout {layout.value}"
        )

    def loop_call(self, name: str, loop: Loop, pointers: Sequence[Operand]) -> KernelCall:
        arguments: dict[str, Argument] = {f"p{i}": pointer for i, pointer in enumerate(pointers)}
        if needs_rows(loop):
            arguments["rows"] = loop.rows.count
        self.kernels[name] = Unspecialized(name, None, (), loop_tile(loop).num_warps, 2)
        return KernelCall(name, LOOP, arguments, grid=loop_grid(loop))

    def _group(
        self, launch: DeviceLaunch, only: RowRange | None, others: tuple[tuple[KernelCall, ...], ...]
    ) -> tuple[KernelCall, ...]:
        first, *rest = (self.call(part, only) for part in (launch, *launch.then))
        return replace(first, others=others), *rest

    def call(self, launch: DeviceLaunch, only: RowRange | None) -> KernelCall:
        """Return the call of a launch for a range of rows (None for all), and add its kernel to `kernels`."""
        absent = {name: None for name, value in launch.arguments.items() if value is None}
        constants = tuple(sorted({**launch.constants, **absent}.items()))
        function = python_function(launch.function)
        module = LIBRARY if isinstance(launch.function, LibraryFunction) else function.__module__
        kernel = Unspecialized(function.__name__, module, constants, launch.num_warps, launch.num_stages)
        name = self.name_of(kernel)
        values = {**launch.constants, **launch.arguments}
        names = list(inspect.signature(function).parameters)
        assert values.keys() == set(names), f"{function.__name__} takes {names}, and was given {list(values)}"
        arguments = {n: launch.arguments[n] for n in names if launch.arguments.get(n) is not None}
        return KernelCall(
            name,
            function.__name__,
            arguments,
            grid=launch.grid,
            only=only,
            sides=launch.sides,
            moved=launch.moved,
            seconds=launch.seconds,
        )

    def name_of(self, kernel: Unspecialized) -> str:
        """Return the kernel's name in calls, and add it to `kernels`."""
        name = self._names.setdefault(kernel, f"{kernel.function}.{len(self._names)}")
        self.kernels[name] = kernel
        return name


def python_function(function: Any) -> Any:
    """The Python function below @triton.jit, interpreted or not, or of a library."""
    return function.fn


def alternatives(
    candidates: Sequence[DeviceLaunch],
) -> list[tuple[DeviceLaunch, RowRange | None, tuple[DeviceLaunch, ...]]]:
    """Return the first candidate that serves each number of rows, as ranges of them in ascending order.

    With each range the other candidates that serve all of it.
    """
    starts = sorted({1, *(c.min_tokens for c in candidates), *(c.max_tokens + 1 for c in candidates if c.max_tokens)})
    ranges: list[tuple[DeviceLaunch, int, int | None]] = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        chosen = next(c for c in candidates if _serves_all(c, start, start))
        last = None if following is None else following - 1
        if ranges and ranges[-1][0] is chosen:
            ranges[-1] = chosen, ranges[-1][1], last
        else:
            ranges.append((chosen, start, last))
    only = [None] if len(ranges) == 1 else [RowRange(_counted(c), first, last) for c, first, last in ranges]
    return [
        (chosen, rows, tuple(c for c in candidates if c is not chosen and _serves_all(c, first, last)))
        for (chosen, first, last), rows in zip(ranges, only, strict=True)
    ]


def _of_counts(launch: DeviceLaunch) -> tuple[DeviceLaunch, ...]:
    """The launch with its limits as counts of a step, if its rows are several per count; empty if no count is within
    the limits."""
    times = next((value.times for value in _values(launch) if isinstance(value, Rows)), 1)
    first, last = -(-launch.min_tokens // times), None if launch.max_tokens is None else launch.max_tokens // times
    return () if last is not None and last < first else (replace(launch, min_tokens=first, max_tokens=last),)


def _serves_all(launch: DeviceLaunch, first: int, last: int | None) -> bool:
    return launch.min_tokens <= first and (
        launch.max_tokens is None or (last is not None and last <= launch.max_tokens)
    )


def _counted(launch: DeviceLaunch) -> RowCount:
    """Whether the launch's rows are tokens or logit rows."""
    counts = [value.count if isinstance(value, Rows) else value for value in _values(launch)]
    return RowCount.LOGIT_ROWS if Count.LOGIT_ROWS in counts else RowCount.TOKENS


def _values(launch: DeviceLaunch) -> list[Argument]:
    """The arguments of the launch and of the launches that follow it."""
    return [value for part in (launch, *launch.then) for value in part.arguments.values()]
