"""Run a lowered GPU program through Triton's interpreter on the same steps as the eager reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmc.codegen.target_kind import kind_of
from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.compiler import packed
from llmc.graph.execute import Chunk
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.weights import WeightSource
from llmc.runtime.executors.triton_interpreter import TritonInterpreterExecutor
from llmc.runtime.loop.step import Step
from llmc.targets import gpu_target


def interpret_steps(
    lowered: DeviceLowered, source: WeightSource, steps: Sequence[Sequence[Chunk]], directory: Path
) -> list[list[Tensor]]:
    """What graph/execute.py's run_steps returns, computed by the kernels' sources; all tokens' logits are wanted."""
    chunks = [chunk for step in steps for chunk in step]
    blocks = -(-max(c.start + len(c.tokens) for c in chunks) // lowered.program.limits.block_size)
    sequences = max(c.sequence for c in chunks) + 1
    executor = interpreter(lowered, source, sequences * blocks, directory)
    results = []
    for step in steps:
        arrays = step_arrays(step, lowered.program.limits.block_size, blocks)
        if lowered.program.states:
            arrays = replace(arrays, state_slots=_ints([chunk.sequence for chunk in step]))
        logits = executor.step(arrays)
        parts = torch.from_numpy(logits.copy()).split([len(chunk.tokens) for chunk in step])
        results.append(list(parts))
    return results


def interpreter(
    lowered: DeviceLowered, source: WeightSource, blocks: int, directory: Path
) -> TritonInterpreterExecutor:
    """An executor of the program, whose sources are written to the directory."""
    for name, text in lowered.sources.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    pairs = zip(lowered.program.weights, lowered.recipes, strict=True)
    weights = {
        slot.name: packed(slot, recipe, source, FiniteWeights(), kind_of(gpu_target("h100"))) for slot, recipe in pairs
    }
    return TritonInterpreterExecutor(lowered.program, directory, weights, blocks)


def step_arrays(step: Sequence[Chunk], size: int, blocks: int) -> Step:
    """Sequence i has blocks i·blocks and on, in reverse order if i is odd."""
    tables = [list(range(c.sequence * blocks, (c.sequence + 1) * blocks))[:: -1 if c.sequence % 2 else 1] for c in step]
    lengths = [len(chunk.tokens) for chunk in step]
    places = [(table, c.start + i) for table, c in zip(tables, step, strict=True) for i in range(len(c.tokens))]
    return Step(
        input_ids=_ints([token for chunk in step for token in chunk.tokens]),
        positions=_ints([p for _, p in places]),
        slot_mapping=_ints([table[p // size] * size + p % size for table, p in places]),
        query_starts=_ints([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
        context_lens=_ints([c.start + len(c.tokens) for c in step]),
        block_tables=_ints(tables),
        logit_rows=_ints(range(len(places))),
        tree_masks=np.zeros(len(places), np.int64),
    )


def _ints(values: Sequence[int] | Sequence[Sequence[int]] | range) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.asarray(values, np.int32)
