"""Check a GPU program's launches before the first: that each fits its kernel's signature and begins within memory.

A kernel decides how far it reads from the beginning of a row. The program decides where rows begin, their number, the
number of programs and their arguments; these are checked for the largest step.
"""

import inspect
import math
from collections.abc import Iterator

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.program import (
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    COMPACTION,
    ITEMSIZES,
    DeviceBinary,
    DeviceKernel,
    Launch,
    Layout,
    Program,
    RowCount,
    StepOutput,
    library_functions,
)
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.program.launch_grid import evaluate_grid
from llmc.program.launch_signature import POINTERS, dtype_of, operand_dtypes, parameter_of
from llmc.program.step_result import largest_result
from llmc.runtime.loop.step import input_names

# CUDA's limits of a grid in each dimension.
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
_MOST_FLOAT = 3.4028234663852886e38
_ALIGNMENT = 16


def check_kernels(program: Program) -> None:
    """Raise EngineFormatError for a kernel that cannot be, or buffers that are not aligned as kernels expect."""
    for problem in _kernel_problems(program):
        raise EngineFormatError(problem, fix=REBUILD)


def launch_problem(launch: Launch, kernel: DeviceKernel, bounds: "LaunchBounds") -> str | None:
    """The problem with a launch of that kernel, as text that follows its name; None if there is none."""
    return next(_launch_problems(launch, kernel, bounds), None)


class LaunchBounds:
    """The counts of a program's largest step, where its buffers begin, and how many elements lie at each operand."""

    def __init__(self, program: Program) -> None:
        limits = program.limits
        self.dtypes = operand_dtypes(program)
        self.buffers = {buffer.name: buffer.offset for buffer in program.buffers}
        self.counts = {
            "T": limits.max_batch_tokens,
            "L": limits.max_logit_rows,
            "R": limits.max_sequences,
            "max_blocks": limits.blocks_for(limits.max_model_len),
        }
        rows = {RowCount.TOKENS: self.counts["T"], RowCount.LOGIT_ROWS: self.counts["L"], RowCount.ONE: 1}
        # (elements, rows); no rows where a row stride means nothing.
        self.extents: dict[tuple[str, str], tuple[int, int | None]] = {}
        for buffer in program.buffers:
            self.extents["buffer", buffer.name] = rows[buffer.rows] * buffer.columns, rows[buffer.rows]
        for slot in program.weights:
            is_matrix = slot.layout is Layout.ROWS and len(slot.shape) == 2
            elements = slot.nbytes // ITEMSIZES[slot.dtype]
            self.extents["weight", slot.name] = elements, slot.shape[0] if is_matrix else None
        for index, cache in enumerate(program.caches):
            for part, nbytes in zip("kv", cache.key_and_value_bytes(limits.block_size), strict=True):
                self.extents["cache", f"{index}.{part}"] = nbytes // ITEMSIZES[cache.dtype], None
        for name, state in program.state_names().items():
            # The state of a convolution of width 1 is empty.
            self.extents["state", name] = max(1, self.counts["R"] * state.nbytes // ITEMSIZES["F32"]), None
        if program.adapters is not None:
            for name, nbytes in program.adapters.nbytes().items():
                self.extents["adapter", name] = nbytes // ITEMSIZES[self.dtypes["adapter", name]], None
        # A pointer into the middle of an input is not allowed, because its place depends on the step's shape.
        for name in (*input_names(len(program.policies)), *CHOICE_INPUTS, COMPACTION):
            self.extents["input", name] = 1, None
        self.extents[ARRIVALS.space, ARRIVALS.name] = MOST_COUNTERS, None
        if program.ranks > 1:
            self.extents["engine", "ranks"] = 1 + program.ranks, None
        result, columns = largest_result(program)
        self.extents["output", "logits"] = result * columns, result
        for name in CHOICE_OUTPUTS:
            self.extents["output", name] = self.counts["L"], self.counts["L"]


def _kernel_problems(program: Program) -> Iterator[str]:
    names = [kernel.name for kernel in program.kernels]
    if len(set(names)) < len(names):
        yield f"a kernel's name appears twice: {next(n for n in names if names.count(n) > 1)!r}"
    for buffer in program.buffers:
        place = buffer.offset
        if any(part % _ALIGNMENT for part in (place.constant, place.tokens, place.logit_rows)):
            yield f"buffer {buffer.name!r} does not always start at a multiple of {_ALIGNMENT} bytes"
    for kernel in program.kernels:
        parameters = [parameter.name for parameter in kernel.parameters]
        if len({*parameters, *kernel.constants}) < len(parameters) + len(kernel.constants):
            yield f"kernel {kernel.name} has two parameters of one name"
        function = library_functions.FUNCTIONS.get(kernel.function)
        if kernel.is_library and (function is None or parameters != list(inspect.signature(function).parameters)):
            called = f"{kernel.function}({', '.join(parameters)})"
            yield f"kernel {kernel.name} is not a function of llmc's library: {called}"
        for arch, binary in kernel.binaries.items():
            if not _is_possible(binary):
                yield f"kernel {kernel.name} cannot be launched as {arch} says: {binary!r:.300}"


def _is_possible(binary: DeviceBinary) -> bool:
    """Within what any GPU has."""
    alignment = binary.scratch_alignment
    return (
        1 <= binary.threads <= 1024
        and 1 <= binary.blocks_per_cluster <= 16
        and 0 <= binary.shared_bytes <= 1 << 20
        and 0 <= binary.extra_pointers <= 8
        and 0 <= binary.scratch_bytes <= 1 << 30
        and 1 <= alignment <= 1 << 16
        and not alignment & (alignment - 1)
    )


def _launch_problems(launch: Launch, kernel: DeviceKernel, bounds: LaunchBounds) -> Iterator[str]:
    names = [parameter.name for parameter in kernel.parameters]
    if sorted(names) != sorted(launch.arguments):
        yield f"has the arguments {', '.join(launch.arguments)}, the kernel takes {', '.join(names)}"
        return
    for parameter in kernel.parameters:
        value = launch.arguments[parameter.name]
        if value is None or isinstance(value, bool):
            yield f"passes {value!r} as {parameter.name}"
            return
        if isinstance(value, str):
            yield f"passes {value!r:.80} as {parameter.name}, which is not a count of a step"
            return
        if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= _MOST_FLOAT):
            yield f"passes {value!r} as {parameter.name}, which is not an fp32 number"
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield f"passes {value!r:.80} as {parameter.name}, which is not a 64-bit number"
        if isinstance(value, Operand):
            yield from _operand_problems(launch, parameter.name, value, bounds)
        needed = parameter_of(bounds.dtypes, parameter.name, value)
        if (needed.type, parameter.type) not in _FITTING and needed.type != parameter.type:
            yield f"passes {_shown(value)} as {parameter.name}, which is {needed.type} and not {parameter.type}"
        if parameter.divisible and not needed.divisible:
            yield f"passes {_shown(value)} as {parameter.name}, compiled for multiples of {_ALIGNMENT} only"
    yield from _grid_problems(launch, bounds)


def _shown(value: Argument) -> str:
    """The text of the argument in program.json."""
    return f"{str(value) if isinstance(value, Operand | Rows | Count) else value!r:.80}"


# A small number may be passed as a large one.
_FITTING = {("i32", "i64")}


def _operand_problems(launch: Launch, name: str, operand: Operand, bounds: LaunchBounds) -> Iterator[str]:
    extent = bounds.extents.get((operand.space, operand.name))
    if extent is None:
        yield f"names {operand}, which the program does not have"
        return
    dtype = dtype_of(bounds.dtypes, operand)
    if dtype not in POINTERS:
        yield f"names {operand}, which is {dtype}, and no kernel takes that"
    elements, rows = extent
    stride = launch.arguments.get(f"{name.removesuffix('_ptr')}_row_stride")
    if isinstance(stride, int) and stride < 0:
        yield f"goes back by {-stride} elements from row to row of {operand}"
    last = operand.offset + (stride * (rows - 1) if isinstance(stride, int) and rows is not None else 0)
    if last >= elements:
        yield f"begins a row at element {last} of {operand}, which has {elements}"
    if (
        operand.space == "input"
        and operand.name in CHOICE_INPUTS
        and (not launch.wanted or StepOutput.LOGITS in launch.wanted)
    ):
        yield f"reads {operand} in steps that choose no tokens"


def _grid_problems(launch: Launch, bounds: LaunchBounds) -> Iterator[str]:
    for counts in (bounds.counts, dict.fromkeys(bounds.counts, 1)):
        for text, most in zip(launch.grid, _MOST_PROGRAMS, strict=False):
            size = evaluate_grid(text, counts)
            if size > most:
                yield f"has {size} programs in one direction, at most {most} can be"
