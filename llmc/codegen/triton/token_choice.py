"""Append to a step the launches that choose tokens where the logits are: the likeliest, a draw, a filtered draw.

BEST      lm_head with argmax in one product (product_best.py) where it is a product of up to 256 rows;
          argmax_rows of the logits otherwise
DRAWN     the logits, then draw_rows
FILTERED  the logits, draw_rows, top_k_rows, row_masses and sample_candidates
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from llmc.codegen.triton.backend import TritonBackend, Unspecialized
from llmc.codegen.triton.kernel import DeviceLaunch, RowsTemplate, rows
from llmc.codegen.triton.kernels.products.dense_gemv import gemv_kernel
from llmc.codegen.triton.kernels.products.dense_narrow import narrow_kernel
from llmc.codegen.triton.kernels.products.product_best import best_gemv_kernel, best_narrow_kernel
from llmc.codegen.triton.kernels.sampling.draw_rows import argmax_rows, draw_rows, join_launch
from llmc.codegen.triton.kernels.sampling.row_masses import row_masses
from llmc.codegen.triton.kernels.sampling.sample_candidates import sample_candidates
from llmc.codegen.triton.kernels.sampling.top_k_rows import top_k_rows
from llmc.graph.dtype_names import DTYPE_NAMES, TORCH_DTYPES
from llmc.program import (
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    Affine,
    Buffer,
    Launch,
    Limits,
    Origin,
    Program,
    RowCount,
    RowRange,
    StepOutput,
)
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.targets import GpuTarget

# Candidates of a row: more filters of more kinds are covered by more of them, and each costs a pass over a chunk.
CANDIDATES = 64
# Blocks of outputs that a program of best_gemv_kernel takes, so that there are few maxima to join.
_GEMV_BLOCKS = 8
_ALIGNMENT = 64
_LOGITS = Operand("output", "logits")


def add_token_choice(program: Program, backend: TritonBackend, target: GpuTarget) -> Program:
    """The program with those launches. Its own give the logits, which BEST does without where it can."""
    tail = _Tail(program, backend, target)
    launches = list(program.launches)
    # Operations on the logits after the product, such as a cap, may change which logit is the largest.
    are_final = all(
        launch.arguments.get("y_ptr") == _LOGITS for launch in launches if _touches_logits(launch) and not launch.sides
    )
    for index, launch in enumerate(program.launches):
        best = _best(launch, backend.kernels[launch.kernel], tail) if are_final else None
        if best is not None:
            launches[index] = replace(launch, wanted=(StepOutput.LOGITS, StepOutput.DRAWN, StepOutput.FILTERED))
            tail.emit(best, (StepOutput.BEST,), launch.only, unless=launch.unless)
    best_from_logits = argmax_rows, (StepOutput.BEST,), {"logits": tail.logits}, {0: "tokens", 1: "scores"}
    sides = next((launch.unless for launch in tail.launches if launch.unless), ())
    for only in rows_left(tail.launches):
        tail.add(*best_from_logits, only)
    if sides:
        # On these sides another product replaces the one that finds the best token, and it writes only logits.
        tail.add(*best_from_logits, sides=sides)
    noise = {"logits": tail.logits, **tail.inputs("temperature", "seeds", "counters")}
    tail.add(draw_rows, (StepOutput.DRAWN,), noise, {0: "tokens", 1: "scores"})
    _add_filtered(tail, noise, program.vocab_size)
    return replace(
        program,
        launches=(*launches, *tail.launches),
        buffers=(*program.buffers, *tail.buffers),
        arena=tail.arena,
        unplanned_arena=_plus(program.unplanned_arena, tail.arena.logit_rows - program.arena.logit_rows),
    )


def rows_left(launches: Sequence[Launch]) -> list[RowRange | None]:
    """The row counts for which no launch gives the best tokens yet, as ranges; None for all of them."""
    done = sorted({(launch.only.first, launch.only.last) for launch in launches if launch.only is not None})
    if not launches:
        return [None]
    if any(launch.only is None for launch in launches):
        return []
    left: list[RowRange | None] = []
    following = 1
    for first, last in done:
        if first > following:
            left.append(RowRange(RowCount.LOGIT_ROWS, following, first - 1))
        if last is None:
            return left
        following = last + 1
    return [*left, RowRange(RowCount.LOGIT_ROWS, following, None)]


def _add_filtered(tail: "_Tail", noise: "dict[str, _Tensor]", vocab_size: int) -> None:
    wanted, count = (StepOutput.FILTERED,), min(CANDIDATES, vocab_size)
    drawn, masses = tail.buffer("drawn", 1, torch.int32), tail.buffer("masses", 1, torch.float32)
    values, indices = tail.buffer("values", count, torch.float32), tail.buffer("indices", count, torch.int32)
    tail.add(draw_rows, wanted, noise, {0: drawn, 1: "scores"})
    tail.add(top_k_rows, wanted, {"logits": tail.logits, "k": count}, {0: values, 1: indices})
    weighed: dict[str, Any] = {"logits": tail.logits, "values": values, **tail.inputs("temperature")}
    tail.add(row_masses, wanted, weighed, {0: masses})
    arguments: dict[str, Any] = {"values": values, "indices": indices, "masses": masses, "drawn": drawn}
    arguments |= {**tail.inputs(*CHOICE_INPUTS), "complete": count == vocab_size}
    tail.add(sample_candidates, wanted, arguments, {0: "tokens", 1: "covered"})


def _touches_logits(launch: Launch) -> bool:
    operands = (a for a in launch.arguments.values() if isinstance(a, Operand))
    return any((a.space, a.name) == (_LOGITS.space, _LOGITS.name) for a in operands)


def _best(launch: Launch, kernel: Unspecialized, tail: "_Tail") -> DeviceLaunch | None:
    """The launch's product with argmax, if it is one that writes the logits and is not split; then the join."""
    constants = dict(kernel.constants)
    is_gemv = kernel.function == gemv_kernel.fn.__name__
    is_whole = is_gemv or (kernel.function == narrow_kernel.fn.__name__ and constants["SPLITS"] == 1)
    has_masks = launch.arguments.get("masks_ptr") is not None
    if launch.arguments.get("y_ptr") != _LOGITS or not is_whole or has_masks:
        return None
    count, outputs, block = launch.arguments["tokens"], constants["OUT"], constants["OUT_BLOCK"]
    assert isinstance(count, Count) and isinstance(outputs, int) and isinstance(block, int)
    blocks = _GEMV_BLOCKS if is_gemv else 1
    chunks = -(-outputs // (block * blocks))
    kept = (
        "IN",
        "OUT",
        "OUT_BLOCK",
        "IN_BLOCK",
        "LINES_AHEAD",
        *(("TOKENS", "AHEAD") if is_gemv else ("TOKEN_BLOCK",)),
    )
    own = {name: constants[name] for name in kept} | {"CHUNKS": chunks}
    scratch: dict[str, Argument] = {
        "maxima_ptr": tail.buffer("maxima", chunks, torch.float32).pointer,
        "places_ptr": tail.buffer("places", chunks, torch.int32).pointer,
    }
    arguments = {
        name: launch.arguments.get(name) for name in ("x_ptr", "x_row_stride", "weight_ptr", "bias_ptr", "tokens")
    }
    into = {**rows("tokens", _output("tokens").rows), **rows("scores", _output("scores").rows)}
    return DeviceLaunch(
        best_gemv_kernel if is_gemv else best_narrow_kernel,
        {**arguments, **scratch},
        own | ({"BLOCKS": blocks} if is_gemv else {}),
        (str(chunks),) if is_gemv else (str(chunks), launch.grid[1]),
        kernel.num_warps,
        kernel.num_stages,
        then=(join_launch(scratch, into, chunks, count),),
        seconds=launch.seconds,
    )


@dataclass(frozen=True)
class _Tensor:
    """Rows in memory, a logit row each. pointer: an operand without stride."""

    pointer: Operand
    columns: int
    dtype: torch.dtype

    @property
    def rows(self) -> Operand:
        """The rows of the logits, without gaps."""
        return replace(self.pointer, stride=self.columns)


class _Tail:
    """The launches being appended, and their buffers, which lie in the arena past all others."""

    def __init__(self, program: Program, backend: TritonBackend, target: GpuTarget) -> None:
        self._backend, self._target, self.limits = backend, target, program.limits
        self._at = len(program.launches)
        self.launches: list[Launch] = []
        self.buffers: list[Buffer] = []
        self.arena = program.arena
        self.logits = _Tensor(_LOGITS, program.vocab_size, torch.float32)

    def inputs(self, *names: str) -> dict[str, _Tensor]:
        """The numbers that each row's request gives."""
        return {name: _Tensor(Operand("input", name), 1, TORCH_DTYPES[CHOICE_INPUTS[name]]) for name in names}

    def buffer(self, name: str, columns: int, dtype: torch.dtype) -> _Tensor:
        """A new one; each different size of a name is one buffer."""
        full = f"choosing_{name}_{columns}"
        if all(buffer.name != full for buffer in self.buffers):
            end, last = self.arena, self._at
            self.buffers.append(Buffer(full, DTYPE_NAMES[dtype], RowCount.LOGIT_ROWS, columns, end, last, last))
            self.arena = _plus(end, -(-columns * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        return _Tensor(Operand("buffer", full), columns, dtype)

    def add(
        self,
        template: RowsTemplate,
        wanted: tuple[StepOutput, ...],
        given: Mapping[str, Any],
        results: Mapping[int, str | _Tensor],
        only: RowRange | None = None,
        sides: tuple[str, ...] = (),
    ) -> None:
        """Launches of an op. given: its arguments, tensors among them. results: where they go; names of outputs."""
        into = {i: _output(r) if isinstance(r, str) else r for i, r in results.items()}
        call = _OperandCall(template.op._schema.name.split("::")[1], given, into, self)
        self.emit(template.candidates(call, self._target)[0], wanted, only, sides=sides)

    def emit(
        self,
        launch: DeviceLaunch,
        wanted: tuple[StepOutput, ...],
        only: RowRange | None,
        *,
        sides: tuple[str, ...] = (),
        unless: tuple[str, ...] = (),
    ) -> None:
        """Append a launch and those that follow it."""
        for index, part in enumerate((launch, *launch.then)):
            call, is_first = self._backend.call(part, only), index == 0
            bytes_moved, seconds = (self._bytes(launch), launch.seconds) if is_first else ("0", None)
            origin = Origin((f"choose_{wanted[0].value}",), None, None)
            function = call.kernel, call.family, call.dtypes, call.arguments
            conditions = only, wanted, sides, unless
            self.launches.append(Launch(*function, origin, bytes_moved, "0", call.grid, *conditions, seconds))

    def _bytes(self, launch: DeviceLaunch) -> str:
        """The logits once where they are read; of a product, W."""
        constants = launch.constants
        if "IN" in constants:
            return str(int(constants["IN"] or 0) * int(constants["OUT"] or 0) * 2)
        return f"{4 * self.logits.columns}*L" if launch.arguments.get("logits_ptr") == _LOGITS else "0"


@dataclass(frozen=True)
class _OperandCall:
    """The RowsCall of an op on tensors that are in memory already."""

    op: str
    given: Mapping[str, Any]
    results: Mapping[int, _Tensor]
    tail: _Tail = field(repr=False)

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.given[name].columns,)

    def count(self, name: str) -> Count:
        return Count.LOGIT_ROWS

    def plain(self, name: str) -> Any:
        return self.given[name]

    def rows(self, name: str) -> Operand:
        tensor: _Tensor = self.given[name]
        return tensor.rows

    def result(self, index: int = 0) -> Operand:
        return self.results[index].rows

    def vector(self, name: str) -> Operand:
        tensor: _Tensor = self.given[name]
        return tensor.pointer

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.given[name].dtype
        return dtype

    def workspace(self, name: str, rows: Count | Rows | int, columns: int, dtype: torch.dtype) -> Operand:
        return self.tail.buffer(f"{self.op}_{name}", columns, dtype).rows

    def limits(self) -> Limits:
        return self.tail.limits


def _output(name: str) -> _Tensor:
    return _Tensor(Operand("output", name), 1, TORCH_DTYPES[CHOICE_OUTPUTS[name]])


def _plus(size: Affine, logit_row_bytes: int) -> Affine:
    return replace(size, logit_rows=size.logit_rows + logit_row_bytes)
