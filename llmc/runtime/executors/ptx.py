"""Run a GPU engine without a GPU and without Triton: the PTX that it keeps of its kernels, executed and checked by the
machine of llmc/ptx (docs/ptx.md).

Memory has its own addresses, the same in every run. A launch may touch the buffers of its operands and nothing else;
of an activation that a step's launches make, only what one of them has written. The first fault ends the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_files import EngineFiles
from llmc.engine_format.kept_ptx import kept_binaries, read_ptx
from llmc.program import ITEMSIZES, Launch, Program, RowCount, StepOutput, library_functions
from llmc.program.launch_arguments import Operand
from llmc.program.rank_memory import memory_bytes
from llmc.program.step_result import result_columns, result_rows
from llmc.ptx.code import Code, load_code
from llmc.ptx.errors import PtxError
from llmc.ptx.global_memory import Buffer
from llmc.ptx.machine import execute
from llmc.runtime.device.arguments import argument_values, extra_pointers, scratch_bytes
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import ARENA, RANKS, PlannedCall
from llmc.runtime.executors.executor import LaunchTime
from llmc.runtime.executors.host_launches import HostLaunches
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.stored_weights import stored_tensor
from llmc.runtime.loop.step import Step
from llmc.settings import settings

# Addresses that no process has: where each memory begins.
_FIRST_ADDRESS, _SPACING = 1 << 48, 1 << 40
_CONSTANT_SPACES = ("weight", "adapter", "input")
_REPORT = "this is a fault of the kernel or of its launch: report it with the model's name"


def open_engine(request: OpeningRequest) -> tuple[PtxExecutor, int]:
    """Open an engine in this machine's memory; for an engine of several ranks, the executor of the first. Raises
    EngineFormatError for an engine that keeps no PTX."""
    request.wait_for_weights()
    blocks, snapshots = request.in_host_memory()
    return open_ptx_rank(request.directory, blocks, snapshots), blocks


def open_ptx_rank(engine: EngineDirectory, blocks: int, snapshots: int = 0) -> PtxExecutor:
    """Return the executor of one rank. engine: has the rank's weights."""
    slots = zip(engine.program.weights, engine.tensors, strict=True)
    weights = {slot.name: stored_tensor(engine, stored) for slot, stored in slots}
    return PtxExecutor(engine.program, engine.files, weights, blocks, snapshots)


class PtxExecutor(HostLaunches):
    """A program whose kernels' PTX is executed. files: the engine's, which have it."""

    def __init__(
        self, program: Program, files: EngineFiles, weights: Mapping[str, Tensor], blocks: int, snapshots: int = 0
    ) -> None:
        self._binaries = kept_binaries(program, files.path)
        self._files = files
        self._codes: dict[str, Code] = {}
        super().__init__(program, weights, blocks, snapshots)
        self._addresses: dict[tuple[str, str], int] = {}
        self._buffers = {buffer.name: buffer for buffer in program.buffers}
        # Which bytes of the arena, and of the logits, this step's launches have written; buffers that have been used.
        self._written = {key: np.zeros(self._octets(key).size, np.uint8) for key in ((ARENA, ""), ("output", "logits"))}
        self._used: set[str] = set()

    def _octets(self, key: tuple[str, str]) -> npt.NDArray[np.uint8]:
        """A memory's bytes."""
        import torch

        octets: npt.NDArray[np.uint8] = self._memory[key].reshape(-1).view(torch.uint8).numpy()
        return octets

    def _address(self, space: str, name: str) -> int:
        """The address at which a memory begins, for the kernels."""
        return self._addresses.setdefault((space, name), _FIRST_ADDRESS + len(self._addresses) * _SPACING)

    def launch_all(self, step: Step, wanted: StepOutput) -> tuple[LaunchTime, ...]:
        """Run every launch in order; then check that every row of the result is complete."""
        times = super().launch_all(step, wanted)
        if wanted is StepOutput.LOGITS:
            self._check_result(result_rows(self.program, len(step.input_ids), len(step.logit_rows)))
        return times

    def _forget(self) -> None:
        super()._forget()
        self._used.clear()
        for marks in self._written.values():
            marks.fill(0)

    def _check_result(self, rows: int) -> None:
        nbytes = result_columns(self.program) * ITEMSIZES["F32"]
        missing = np.flatnonzero(self._written["output", "logits"][: rows * nbytes] == 0)
        if len(missing):
            row, place = divmod(int(missing[0]), nbytes)
            raise PtxError(
                f"a step did not write all logits: row {row}, column {place // ITEMSIZES['F32']} is missing",
                at="the launches that write logits",
                fix=_REPORT,
            )

    def run_library(self, call: PlannedCall, counts: Mapping[str, int]) -> None:
        """Run a library call. It does not report its writes, so all of its output memory counts as written."""
        launch = self.launched.launches[call.index]
        shape = _shape_of(counts)
        buffers = {name: buffer for name, (_, buffer) in self._operands(launch, shape)}
        super().run_library(call, counts)
        for name, buffer in buffers.items():
            if buffer.written is not None and name not in library_functions.READ_ONLY:
                buffer.written.fill(1)

    def run_kernel(self, call: PlannedCall, grid: tuple[int, int, int], counts: Mapping[str, int]) -> None:
        """Run one launch. Raises PtxError if the checks find a fault, or if it does not end."""
        shape = _shape_of(counts)
        launch, binary = self.launched.launches[call.index], self._binaries[call.kernel.name]
        buffers = dict(operand for _, operand in self._operands(launch, shape))
        scratch = np.zeros(max(16, scratch_bytes(binary, grid)), np.uint8)
        area = Buffer("scratch memory", self._address("scratch", ""), scratch, may_change=False)
        extra = extra_pointers(binary, area.address)
        code = self._code(call.kernel.name)
        report = execute(
            code,
            grid,
            argument_values(call, shape, self._address, extra),
            [*buffers.values(), area, *self._rank_buffers()],
            may_begin_early=code.plan.waits_for_grids,
            limit=settings().ptx_instructions,
        )
        if report.findings:
            more = f"; {len(report.findings) - 1} more faults" if len(report.findings) > 1 else ""
            raise PtxError(
                f"{report.findings[0]}; in {report.counts[0]} threads{more}",
                at=f"launch {call.index} of {call.kernel.name}, nodes {', '.join(launch.origin.nodes)}",
                fix=_REPORT,
            )

    def _operands(self, launch: Launch, shape: StepShape) -> Iterator[tuple[str, tuple[tuple[str, str], Buffer]]]:
        """The memory of each operand, and its key, by the parameter's name."""
        for name, value in launch.arguments.items():
            if isinstance(value, Operand):
                key = value.space, value.name
                is_activation = value.space == "buffer"
                yield name, (key, self._activation(value.name, shape) if is_activation else self._memory_of(key))

    def _memory_of(self, key: tuple[str, str]) -> Buffer:
        is_constant = key[0] in _CONSTANT_SPACES
        return Buffer(
            f"{key[0]} {key[1]}",
            self._address(*key),
            self._octets(key),
            is_writable=not is_constant and key != RANKS,
            may_change=not is_constant,
            written=self._written.get(key),
        )

    def _activation(self, name: str, shape: StepShape) -> Buffer:
        """A buffer of the arena: what it had before its first use in a step belongs to another."""
        buffer = self._buffers[name]
        start = buffer.offset.at(tokens=shape.tokens, logit_rows=shape.logit_rows)
        rows = {RowCount.TOKENS: shape.tokens, RowCount.LOGIT_ROWS: shape.logit_rows, RowCount.ONE: 1}[buffer.rows]
        place = slice(start, start + rows * buffer.columns * ITEMSIZES[buffer.dtype])
        data, written = self._octets((ARENA, ""))[place], self._written[ARENA, ""][place]
        if name not in self._used:
            self._used.add(name)
            data.fill(0xFF)
            written.fill(0)
        return Buffer(f"buffer {name}", self._address(ARENA, "") + start, data, written=written)

    def _rank_buffers(self) -> list[Buffer]:
        """The memory of all ranks, at this process's own addresses."""
        table = self._memory.get(RANKS)
        if table is None:
            return []
        nbytes = memory_bytes(self.program.ranks)
        return [
            Buffer(f"rank {rank}'s memory", address, _at(address, nbytes))
            for rank, address in enumerate(int(entry) for entry in table[1:])
        ]

    def _code(self, name: str) -> Code:
        if name not in self._codes:
            binary = self._binaries[name]
            assert binary.assembly is not None, "checked when the engine was opened"
            text = read_ptx(self._files, binary.assembly)
            self._codes[name] = load_code(
                text,
                str(self._files.path / binary.assembly),
                threads=binary.threads,
                shared_bytes=binary.shared_bytes,
                entry=binary.entry,
            )
        return self._codes[name]


def _shape_of(counts: Mapping[str, int]) -> StepShape:
    return StepShape(counts["T"], counts["L"], counts["R"], counts["max_blocks"])


def _at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that this process has mapped."""
    kind: Any = ctypes.c_uint8 * nbytes
    return np.ctypeslib.as_array(kind.from_address(address))
