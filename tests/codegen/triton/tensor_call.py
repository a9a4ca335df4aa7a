"""Launch a template's candidates on tensors, interpreted or on a device, and compare with the op's reference.

TensorCall stands where lowering's own Call stands: it lays rows out with a gap after each, so that a kernel which takes
the width for the row stride is caught, and fills results with NaN, so that an element never written is caught.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.call import CODE_ROW_PARTS
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.codegen.triton.backend import python_function
from llmc.codegen.triton.code_rows import blocked_rows, code_rows
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, LibraryFunction
from llmc.codegen.triton.mask_rows import mask_rows
from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS
from llmc.graph.op_record import RECORDS
from llmc.program import Layout, Limits, code_rows_layout
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.program.launch_grid import evaluate_grid
from llmc.runtime.executors.triton_interpreter import allow_computed_bounds, interpretable
from tests.codegen.triton.claimed import Claimed, values_of
from tests.codegen.triton.ptx_device import PtxDevice, buffer_of, run_ptx
from tests.codegen.triton.specialized_kernel import specialized_kernel
from tests.gpu_target import gpu_target

_GAP = 16
# Arguments without a row for each token.
_WHOLE = ("weight", *CODE_PARTS, "masks", "bias", "inv_freq", "order", "lora_a", "A", "means")
_MOST_ROWS = 8192

Memory = Mapping[tuple[str, str], Tensor]


def check(
    template: KernelTemplate,
    *arguments: Any,
    device: str,
    tolerance: float,
    target: str = "h100",
    in_place: bool = False,
    gap: int = _GAP,
) -> list[DeviceLaunch]:
    """Every candidate that serves these rows gives the reference's results; returns those candidates.

    device: cpu, where kernels are interpreted, cuda, or a PtxDevice. On the CPU, of candidates that differ in their
    number of SPLITS only those with one and with the most are run.
    gap: elements between rows. tolerance: of ‖out - reference‖ / ‖reference‖, for each result and each cache.
    """
    reference = RECORDS[template.op].reference
    expected_arguments = [a.clone() if isinstance(a, Tensor) else a for a in values_of(arguments)]
    returned = reference(*expected_arguments)
    expected = () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
    mutated = [i for i, a in enumerate(template.op._schema.arguments) if a.is_write]
    first = TensorCall(template, arguments, expected, device, in_place, gap)
    candidates = [(i, c) for i, c in enumerate(first.candidates(target)) if _serves(c, first.tokens)]
    served = [c for _, c in candidates]
    for index, candidate in candidates:
        if device != "cuda" and any(_splits_more(other, candidate) for other in served):
            continue
        call = TensorCall(template, arguments, expected, device, in_place, gap)
        launch = call.candidates(target)[index]
        for step in (launch, *launch.then):
            call.run(step)
        call.check_written()
        names = [template.op._schema.arguments[i].name for i in mutated]
        carried = [call.memory["state" if n == "state" else "cache", n] for n in names]
        got = [call.results[i] for i in range(len(expected))] + carried
        wanted = [*expected, *(expected_arguments[i] for i in mutated)]
        for g, w in zip(got, wanted, strict=True):
            error = relative_error(g, w)
            assert error <= tolerance, f"candidate {index} {launch.constants}: error {error:.2e} > {tolerance:.0e}"
    assert served, f"no candidate serves {first.tokens} rows"
    return served


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """‖got - wanted‖ / ‖wanted‖ in fp64 of what is finite; infinite for another shape, dtype, or place of a NaN or an
    infinity."""
    got, wanted = got.cpu(), wanted.cpu()
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    numbers = got.double(), wanted.double()
    if any(not torch.equal(at(numbers[0]), at(numbers[1])) for at in (torch.isnan, torch.isposinf, torch.isneginf)):
        return float("inf")
    finite = [number.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for number in numbers]
    return float((finite[0] - finite[1]).norm() / finite[1].norm().clamp_min(1e-30))


class TensorCall:
    """A Call over tensors. results: views of the memory where a launch leaves them."""

    def __init__(
        self,
        template: KernelTemplate,
        arguments: Sequence[Any],
        expected: Sequence[Tensor],
        device: str,
        in_place: bool,
        gap: int = _GAP,
    ) -> None:
        self.op, self._template = template.op, template
        self._arguments = _by_name(template.op, arguments)
        self._gap = gap
        self._ptx = device if isinstance(device, PtxDevice) else None
        self._device, self.memory, self.results = home_of(device), dict[tuple[str, str], Tensor](), dict[int, Tensor]()
        # Where kernels may write, and which bytes of a tensor have a value; all of others have.
        self._writable: set[tuple[str, str]] = {(ARRIVALS.space, ARRIVALS.name)}
        self._written: dict[tuple[str, str], Tensor] = {}
        self._put(ARRIVALS, torch.zeros(MOST_COUNTERS, dtype=torch.int32))
        self._expected = expected
        self._aliases = {index: name for name, index in template.in_place} if in_place else {}
        self.tokens = arguments[0].shape[0]

    def candidates(self, target: str = "h100") -> Sequence[DeviceLaunch]:
        """The launches for a target; where kernels are compiled for a GPU, for that."""
        return self._template.candidates(self, gpu_target(self._ptx or target))

    def within(self, name: str) -> TensorCall | None:
        argument = self._arguments[name]
        if not isinstance(argument, Claimed):
            return None
        inner = copy.copy(self)  # of the same memory
        inner.op, inner._arguments = argument.op, _by_name(argument.op, argument.arguments)
        return inner

    def names(self) -> tuple[str, ...]:
        return tuple(self._arguments)

    def producer(self, name: str, index: int) -> None:
        return None

    def readers(self, index: int) -> tuple[TensorCall, ...]:
        return ()

    def _is_whole(self, name: str) -> bool:
        """Values are a weight's beside its masks; elsewhere they are of rows."""
        return name in _WHOLE or (name == "values" and "masks" in self._arguments)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._arguments[name].shape)
        return shape if self._is_whole(name) or name.endswith("_cache") else shape[1:]

    def count(self, name: str) -> Count:
        return Count.LOGIT_ROWS if name == "rows" else Count.TOKENS

    def plain(self, name: str) -> Any:
        return self._arguments[name]

    def rows(self, name: str) -> Operand | None:
        tensor = self._arguments[name]
        if tensor is None:
            return None
        return self._in_rows(name, tensor)

    def result(self, index: int = 0) -> Operand:
        expected = self._expected[index]
        alias = self._aliases.get(index)
        unwritten = torch.full_like(expected, _unwritten(expected.dtype))
        operand = self._in_rows(alias or f"result{index}", self._arguments[alias] if alias else unwritten)
        self._writable.add((operand.space, operand.name))
        stored = self.memory[operand.space, operand.name]
        self.results[index] = stored[:, : expected[0].numel()].reshape(expected.shape)
        return operand

    def vector(self, name: str) -> Operand | None:
        tensor = self._arguments[name]
        if tensor is None:
            return None
        # Wider integers are masks.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return self._put(Operand("input", name), tensor.to(dtype).contiguous())

    def weight(self, name: str, layout: Layout) -> Operand:
        assert layout is Layout.ROWS
        return self._put(Operand("weight", name), self._arguments[name].contiguous())

    def code_panels(self, layout: Layout) -> Operand:
        parts = {name: self._arguments[name] for name in CODE_PARTS if self._arguments.get(name) is not None}
        return self._put(Operand("weight", "codes"), pack_codes(parts, self._arguments["format"], layout))

    def sparse_panels(self, layout: Layout, dtype: torch.dtype) -> Operand:
        raise AssertionError("kernels of GPUs read no panels")

    def sparse_rows(self, dtype: torch.dtype) -> tuple[Operand, Operand, Operand]:
        values, masks = self._arguments["values"], self._arguments["masks"]
        return (
            self._put(Operand("weight", "values"), values.to(dtype)),
            self._put(Operand("weight", "masks"), mask_rows(masks, Layout.MASK_ROWS)),
            self._put(Operand("weight", "starts"), mask_rows(masks, Layout.MASK_STARTS)),
        )

    def code_rows(self) -> dict[str, Operand | None]:
        format, given = self._arguments["format"], self._arguments
        layout, parts = code_rows_layout(format), {name: given[name] for name in CODE_PARTS if given[name] is not None}
        floats = ("scales", "zeros", "minima")
        stored: dict[str, Tensor] = {name: parts[name].contiguous() for name in floats if name in parts}
        if not CODE_FORMATS[format].is_blocked:
            stored["codes"] = code_rows(parts["codes"], layout)
        else:
            stored["codes"] = blocked_rows(parts, format, layout)
        if "scale_steps" in parts:
            stored["steps"] = blocked_rows(parts, format, Layout.STEP_ROWS)
        placed = {name: self._put(Operand("weight", name), tensor) for name, tensor in stored.items()}
        return {name: placed.get(name) for name in CODE_ROW_PARTS}

    def table(self, name: str) -> Layout:
        return Layout.ROWS

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._arguments[name].dtype
        return dtype

    def workspace(self, name: str, rows: Count | Rows | int, columns: int, dtype: torch.dtype) -> Operand:
        count = rows if isinstance(rows, int) else self.tokens * (rows.times if isinstance(rows, Rows) else 1)
        unwritten = torch.full((count, columns), _unwritten(dtype), dtype=dtype, device=self._device)
        operand = self._put(Operand("buffer", f"workspace_{name}", stride=columns), unwritten)
        self._writable.add((operand.space, operand.name))
        marks = torch.zeros(unwritten.numel() * unwritten.itemsize, dtype=torch.uint8)
        self._written.setdefault((operand.space, operand.name), marks)
        return operand

    def cache(self, name: str) -> Operand:
        return self._carried(Operand("cache", name))

    def state(self, name: str) -> Operand:
        return self._carried(Operand("state", name))

    def _carried(self, operand: Operand) -> Operand:
        if any(a.name == operand.name and a.is_write for a in self.op._schema.arguments):
            self._writable.add((operand.space, operand.name))
        return self._put(operand, self._arguments[operand.name].clone())

    def block_size(self) -> int:
        return int(self._arguments["k_cache"].shape[2])

    def limits(self) -> Limits:
        if "block_tables" not in self._arguments:
            return Limits(_MOST_ROWS, 1, _MOST_ROWS, _MOST_ROWS, 16)
        requests, blocks = self._arguments["block_tables"].shape
        return Limits(self.tokens, requests, self.tokens, blocks * self.block_size(), self.block_size())

    def give(self, operand: Operand, tensor: Tensor, *, is_written: bool = False) -> Operand:
        """Memory for an argument that the op does not have. is_written: the kernel may write it."""
        if is_written:
            self._writable.add((operand.space, operand.name))
        return self._put(operand, tensor)

    def run(self, launch: DeviceLaunch, edits: Sequence[tuple[str, str]] = ()) -> None:
        """Launch on the tensors. edits: of the PTX, as for `launch_compiled`."""
        rows = self._arguments.get("rows")
        counts = {"T": self.tokens, "L": len(rows) if isinstance(rows, Tensor) else self.tokens, "R": 1}
        if "query_starts" in self._arguments:
            counts["R"] = len(self._arguments["query_starts"]) - 1
        if "block_tables" in self._arguments:
            counts |= {"R": self.limits().max_sequences, "max_blocks": self._arguments["block_tables"].shape[1]}
        grid = tuple(evaluate_grid(text, counts) for text in launch.grid)
        if self._ptx is not None and not isinstance(launch.function, LibraryFunction):
            self._run_ptx(self._ptx, launch, grid, counts, edits)
            return
        for value in launch.arguments.values():  # Of a library, which says nothing of what it writes.
            if isinstance(value, Operand) and (value.space, value.name) in self._writable & self._written.keys():
                self._written[value.space, value.name].fill_(1)
        self._run_python(launch, grid, counts, self.memory)

    def _run_python(self, launch: DeviceLaunch, grid: tuple[int, ...], counts: dict[str, int], memory: Memory) -> None:
        """By Triton: interpreted on the CPU, compiled on a device."""
        bound = {name: _bind(value, counts, memory) for name, value in launch.arguments.items()}
        function = launch.function
        if self._device == "cpu":
            allow_computed_bounds()
            if not isinstance(function, LibraryFunction):
                module = python_function(function)
                function = interpretable(module.__globals__, module.__name__)
        function[grid](**bound, **launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages)

    def _run_ptx(
        self,
        device: PtxDevice,
        launch: DeviceLaunch,
        grid: tuple[int, ...],
        counts: dict[str, int],
        edits: Sequence[tuple[str, str]],
    ) -> None:
        """As compiled for the device; only tensors that the launch is given can be reached. What the interpreter makes
        of the same is compared."""
        given = {(v.space, v.name): v for v in launch.arguments.values() if isinstance(v, Operand)}
        stored = [key for key in given if key in self._writable]
        twin = self.memory | {key: self.memory[key].clone() for key in stored}
        buffers = {
            key: buffer_of(key[1], i, self.memory[key], self._written.get(key), is_writable=key in self._writable)
            for i, key in enumerate(given)
        }
        values = {
            name: buffers[value.space, value.name].address if isinstance(value, Operand) else _bind(value, counts, {})
            for name, value in launch.arguments.items()
        }
        kernel = specialized_kernel(self.memory, launch, python_function(launch.function).__name__)
        run_ptx(device, kernel, grid, values, list(buffers.values()), edits)
        self._run_python(launch, grid, counts, twin)
        device.differences.add(kernel.function, {key[1]: (self.memory[key], twin[key]) for key in stored})

    def check_written(self) -> None:
        """That counters are zero again, and, on a PtxDevice, that each element of each result has been written."""
        assert not self.memory[ARRIVALS.space, ARRIVALS.name].any()
        if self._ptx is None:
            return
        for index, result in self.results.items():
            marks = next(
                m.view(result.dtype)
                for key, m in self._written.items()
                if self.memory[key].data_ptr() == result.untyped_storage().data_ptr()
            )
            rows = marks.view(torch.uint8).view(result.shape[0], -1)[:, : result[0].numel() * result.itemsize]
            assert bool(rows.all()), f"elements of result {index} are not written"

    def _in_rows(self, name: str, tensor: Tensor) -> Operand:
        flat = tensor.reshape(tensor.shape[0], -1).to(self._device)
        padded = flat.new_full((flat.shape[0], flat.shape[1] + self._gap), _unwritten(tensor.dtype))
        padded[:, : flat.shape[1]] = flat
        operand = self._put(Operand("buffer", name, stride=padded.shape[1]), padded)
        marks = torch.zeros(padded.shape[0], padded.shape[1] * padded.itemsize, dtype=torch.uint8)
        marks[:, : flat.shape[1] * padded.itemsize] = not name.startswith("result")
        self._written.setdefault(("buffer", name), marks.reshape(-1))
        return operand

    def _put(self, operand: Operand, tensor: Tensor) -> Operand:
        key = operand.space, operand.name
        if key not in self.memory:
            self.memory[key] = tensor.to(self._device)
        return operand


def _bind(value: Argument, counts: dict[str, int], memory: Memory) -> Any:
    if isinstance(value, Operand):
        return memory[value.space, value.name]
    return value.at(counts) if isinstance(value, Count | Rows) else value


def home_of(device: str) -> str:
    """Where a device's tensors are."""
    return device if device in ("cuda", "meta") else "cpu"


def _by_name(op: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return defaults | dict(zip(defaults, arguments, strict=False))


def _unwritten(dtype: torch.dtype) -> float:
    """What no kernel may read and none writes."""
    return float("nan") if dtype.is_floating_point else -1


def _splits_more(launch: DeviceLaunch, other: DeviceLaunch) -> bool:
    """Whether a launch is like another that splits its sums, but splits them in more parts."""
    splits, fewer = (int(way.constants.get("SPLITS") or 1) for way in (launch, other))
    is_alike = launch.function is other.function and {**other.constants, "SPLITS": splits} == launch.constants
    return is_alike and splits > fewer > 1


def _serves(launch: DeviceLaunch, tokens: int) -> bool:
    most = launch.max_tokens
    return launch.min_tokens <= tokens and (most is None or tokens <= most)
