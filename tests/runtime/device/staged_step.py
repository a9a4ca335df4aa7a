"""A step read from the memory that a device would copy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.program import HIDDEN, ROW_ADAPTERS, STATE_SLOTS, STEP_INPUTS, group_input
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.loop.step import Step

_OF_GROUPS = {"slot_mapping": "group_slots", "block_tables": "group_tables", "context_lens": "group_lens"}
_DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64}


def staged_step(memory: np.ndarray, shape: StepShape, step: Step) -> Step:
    """The padded step of a bucket. step: the step itself, for which inputs it has."""
    counts = dict.fromkeys(("context_lens", "block_tables", STATE_SLOTS), shape.requests)
    counts |= dict.fromkeys(("logit_rows", ROW_ADAPTERS), shape.logit_rows) | {"query_starts": shape.requests + 1}
    columns = {"block_tables": (shape.max_blocks,), HIDDEN: (shape.hidden,)}
    arrays: dict[str, Any] = {}
    for base, group, _ in step.inputs_by_group():
        size = (counts.get(base, shape.tokens), *columns.get(base, ()))
        found = staged_input(memory, shape, group_input(base, group), size, STEP_INPUTS.get(base, "I32"))
        if group:
            arrays.setdefault(_OF_GROUPS[base], []).append(found)
        else:
            arrays[base] = found
    whole: dict[str, Any] = {name: np.stack(own) if isinstance(own, list) else own for name, own in arrays.items()}
    return replace(step, **whole)


def staged_input(memory: np.ndarray, shape: StepShape, name: str, size: tuple[int, ...], dtype: str) -> np.ndarray:
    """A copy of one input."""
    start, kind = shape.input_offsets()[name], np.dtype(_DTYPES[dtype])
    found: np.ndarray = memory[start : start + math.prod(size) * kind.itemsize].view(kind).reshape(size).copy()
    return found
