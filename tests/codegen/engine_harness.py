"""Run a compiled engine through its C interface on the same steps as the eager reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.cpp.build import SOURCE_NAME, compile_source, library_name
from llmc.codegen.cpp.lowering import Lowered
from llmc.codegen.target_kind import kind_of
from llmc.compiler import packed
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.execute import Chunk
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.weights import WeightSource
from llmc.program import Program
from llmc.program.engine_structs import LlmcBindings, LlmcStep
from llmc.targets import CpuTarget, host_target

_INT32 = ctypes.POINTER(ctypes.c_int32)


class OpenEngine:
    """A compiled engine with its weights packed, its caches for `sequences` of `blocks` blocks, and an arena.

    The arena is filled with NaN before each step, so that nothing is read that the step has not written. call_step
    calls the engine's step function; a test may put another caller in its place.
    """

    def __init__(
        self, library: Path, program: Program, weights: Sequence[Tensor], sequences: int, blocks: int, threads: int
    ) -> None:
        self._program, self._blocks = program, blocks
        self._library = ctypes.CDLL(str(library))
        self._library.llmc_engine_open.restype = ctypes.c_void_p
        self._library.llmc_engine_step.argtypes = (ctypes.c_void_p, ctypes.POINTER(LlmcStep))
        self._library.llmc_engine_close.argtypes = (ctypes.c_void_p,)
        self.step_function = self._library.llmc_engine_step
        self.call_step: Callable[..., object] = lambda function, engine, step: function(engine, step)
        size = program.limits.block_size
        self.caches = [
            torch.zeros(sequences * blocks * nbytes // TORCH_DTYPES[c.dtype].itemsize, dtype=TORCH_DTYPES[c.dtype])
            for c in program.caches
            for nbytes in c.key_and_value_bytes(size)
        ]
        limits = program.limits
        arena_bytes = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
        self._arena = torch.empty(arena_bytes // 4 + 16, dtype=torch.float32)
        self._weights = list(weights)
        self._tables = (_pointers(self._weights), _pointers(self.caches))
        aligned = -(-self._arena.data_ptr() // 64) * 64
        bindings = LlmcBindings(*self._tables, aligned, threads)
        self._engine = self._library.llmc_engine_open(ctypes.byref(bindings))
        assert self._engine

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._library.llmc_engine_close(self._engine)

    def step(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Logits [chunk's tokens, vocabulary] of each chunk."""
        count = sum(len(chunk.tokens) for chunk in chunks)
        return list(self.logits(chunks, range(count)).split([len(chunk.tokens) for chunk in chunks]))

    def logits(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Tensor:
        """Logits [rows, vocabulary] of the step's tokens at `rows`."""
        size, lengths = self._program.limits.block_size, [len(chunk.tokens) for chunk in chunks]
        tables = [self._table(chunk.sequence) for chunk in chunks]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.tokens))]
        owners = [table for table, chunk in zip(tables, chunks, strict=True) for _ in chunk.tokens]
        arrays = [
            [t for chunk in chunks for t in chunk.tokens],
            positions,
            [table[p // size] * size + p % size for table, p in zip(owners, positions, strict=True)],
            [sum(lengths[:i]) for i in range(len(lengths) + 1)],
            [chunk.start + len(chunk.tokens) for chunk in chunks],
            [block for table in tables for block in table],
            list(rows),
        ]
        held: list[Any] = [(ctypes.c_int32 * len(a))(*a) for a in arrays]
        held.append((ctypes.c_int64 * len(positions))())
        logits = torch.full((len(rows), self._program.vocab_size), float("nan"))
        self._arena.fill_(float("nan"))
        counts = (len(positions), len(chunks), len(rows), self._blocks)
        step = LlmcStep(*counts, *(ctypes.cast(a, ctypes.c_void_p) for a in held), logits.data_ptr())
        self.call_step(self.step_function, self._engine, ctypes.byref(step))
        return logits

    def _table(self, sequence: int) -> list[int]:
        first = sequence * self._blocks
        return list(range(first, first + self._blocks))[:: -1 if sequence % 2 else 1]


def run_engine(
    lowered: Lowered,
    source: WeightSource,
    steps: Sequence[Sequence[Chunk]],
    target: CpuTarget,
    directory: Path,
    threads: int = 1,
) -> list[list[Tensor]]:
    """What graph/execute.py's run_steps returns, computed by the engine compiled into `directory`."""
    library = compile_engine(lowered, target, directory)
    chunks = [chunk for step in steps for chunk in step]
    blocks = -(-max(c.start + len(c.tokens) for c in chunks) // lowered.program.limits.block_size)
    sequences = max(c.sequence for c in chunks) + 1
    weights = packed_weights(lowered, source)
    with OpenEngine(library, lowered.program, weights, sequences, blocks, threads) as engine:
        return [engine.step(step) for step in steps]


def compile_engine(lowered: Lowered, target: CpuTarget, directory: Path) -> Path:
    """Write the source and the library as an engine has them under `directory`; returns the path of the library."""
    source = directory / SOURCE_NAME
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(lowered.source, encoding="utf-8")
    content = compile_source(lowered, source, target)
    library = directory / library_name(content)
    library.write_bytes(content)
    return library


def packed_weights(lowered: Lowered, source: WeightSource) -> list[Tensor]:
    """Each weight as the kernels read it."""
    pairs = zip(lowered.program.weights, lowered.recipes, strict=True)
    weights = [packed(slot, recipe, source, FiniteWeights(), kind_of(host_target())) for slot, recipe in pairs]
    for slot, weight in zip(lowered.program.weights, weights, strict=True):
        assert weight.nbytes == slot.nbytes
    return weights


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*(t.data_ptr() for t in tensors))
