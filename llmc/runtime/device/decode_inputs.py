"""Decodes padded to buckets, whose inputs stay in place from step to step: a step writes only its own requests' rows.

A bucket is a shape: a number of requests from `request_buckets`, and block tables with a power of two columns. Padding
requests are decodes of token 0 at position 0 in a scratch block that no real request uses. They read and write only
that block and a scratch slot of states, and their logits follow those of the real requests.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.program import (
    ADAPTERS,
    CHOICE_INPUTS,
    HIDDEN,
    ROW_ADAPTERS,
    STATE_SLOTS,
    STEP_INPUTS,
    Limits,
    group_input,
)
from llmc.runtime.device.inputs import LEAST_COLUMNS, StepShape
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoices

Memory = npt.NDArray[np.uint8]
_DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64}


class DecodeInputs:
    """Writes decodes into `memory`, which other steps may also use.

    scratch_blocks: the block for padding in each group of caches. scratch_slot: the slot of states for padding.
    """

    def __init__(self, limits: Limits, memory: Memory, scratch_blocks: Sequence[int], scratch_slot: int) -> None:
        self._memory, self._block_size = memory, limits.block_size
        self._scratch_blocks, self._scratch_slot = scratch_blocks, scratch_slot
        sizes = request_buckets(limits)
        # By number of requests: that of the bucket.
        self._sizes = [next(size for size in sizes if size >= count) for count in range(sizes[-1] + 1)]
        self._buckets: dict[tuple[int, int, int, bool, bool, int], _Bucket] = {}
        self._last: _Bucket | None = None

    def write(self, step: Step, choices: RowChoices | None) -> StepShape | None:
        """Write a step in which each request has one token and needs its logits. Returns the shape of its bucket.

        Returns None and writes nothing for any other step. choices: How rows are chosen, for a step that chooses
        tokens.
        """
        count = len(step.context_lens)
        if not count == len(step.input_ids) == len(step.logit_rows):
            return None
        bucket = self._bucket(step, count)
        bucket.write(step, choices, is_kept=bucket is self._last)
        self._last = bucket
        return bucket.shape

    def lose(self) -> None:
        """Forget what is in the memory, because another step has overwritten it: the next write is a full one."""
        self._last = None

    def _bucket(self, step: Step, count: int) -> "_Bucket":
        requests, columns = self._sizes[count], max(LEAST_COLUMNS, 1 << (step.block_tables.shape[1] - 1).bit_length())
        hidden = 0 if step.hidden is None else step.hidden.shape[1]
        groups = 0 if step.group_tables is None else len(step.group_tables)
        key = requests, columns, hidden, step.adapter_of_token is not None, step.state_slots is not None, groups
        bucket = self._buckets.get(key)
        if bucket is None:
            shape = StepShape(requests, requests, *key)
            scratch = [(block, block * self._block_size) for block in self._scratch_blocks]
            bucket = self._buckets[key] = _Bucket(shape, self._memory, scratch, self._scratch_slot)
        return bucket


def request_buckets(limits: Limits) -> tuple[int, ...]:
    """Request counts that graphs are made for: 1, 2, 4, 8, then eighths of a power of two, up to the limits."""
    most = min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows)
    sizes = {most}
    size = 1
    while size < most:
        sizes.add(size)
        size += max(1, 1 << max(0, size.bit_length() - 4)) if size >= 8 else size
    return tuple(sorted(sizes))


class _Bucket:
    """Views of the memory for one shape. scratch: block and slot for padding, by group of caches."""

    def __init__(self, shape: StepShape, memory: Memory, scratch: Sequence[tuple[int, int]], scratch_slot: int) -> None:
        self.shape, count = shape, shape.requests
        offsets, dtypes = shape.input_offsets(), STEP_INPUTS | CHOICE_INPUTS

        def view(name: str, *sizes: int) -> npt.NDArray[np.generic]:
            dtype = np.dtype(_DTYPES[dtypes.get(name, "I32")])
            start = offsets[name]
            return memory[start : start + math.prod(sizes) * dtype.itemsize].view(dtype).reshape(sizes)

        # Inputs with an entry for each request, by their names in a step, and the entry of padding.
        per_request: dict[str, npt.ArrayLike] = {
            "input_ids": 0,
            "positions": 0,
            "slot_mapping": scratch[0][1],
            "context_lens": 1,
            "logit_rows": np.arange(count),
        }
        per_request |= dict.fromkeys((ADAPTERS, ROW_ADAPTERS), 0) if shape.adapters else {}
        per_request |= {STATE_SLOTS: scratch_slot} if shape.states else {}
        per_request |= {HIDDEN: 0} if shape.hidden else {}
        columns = {HIDDEN: (shape.hidden,)}
        self._rows = [(name, view(name, count, *columns.get(name, ()))) for name in per_request]
        self._tables = [view(group_input("block_tables", g), count, shape.max_blocks) for g in range(1 + shape.groups)]
        # The arrays of a step that have a row for each group after the first, and the views of these rows.
        self._of_groups = [
            (attribute, [view(group_input(name, 1 + g), count) for g in range(shape.groups)])
            for attribute, name in (("group_slots", "slot_mapping"), ("group_lens", "context_lens"))
        ]
        self._choices = [(name, view(name, count), value) for name, value in BEST._asdict().items()]
        self._padding: list[tuple[npt.NDArray[np.generic], npt.ArrayLike]] = [
            (view("query_starts", count + 1), np.arange(count + 1)),
            (view("tree_masks", count), 0),
            *((own, per_request[name]) for name, own in self._rows),
            *((table, block) for table, (block, _) in zip(self._tables, scratch, strict=True)),
            *zip(self._of_groups[0][1], (slot for _, slot in scratch[1:]), strict=True),
            *((lens, 1) for lens in self._of_groups[1][1]),
        ]
        self._count = self._width = 0
        self._is_best = False

    def write(self, step: Step, choices: RowChoices | None, *, is_kept: bool) -> None:
        """Write the step's rows. is_kept: the memory is as the last call of this object has left it."""
        count, width = step.block_tables.shape
        if not is_kept or count < self._count or width < self._width:
            for view, value in self._padding:
                view[:] = value
        self._is_best = is_kept and self._is_best
        self._count, self._width = count, width
        for name, view in self._rows:
            view[:count] = getattr(step, name)
        self._tables[0][:count, :width] = step.block_tables
        if step.group_tables is not None:
            for table, own in zip(self._tables[1:], step.group_tables, strict=True):
                table[:count, :width] = own
            for name, views in self._of_groups:
                for view, values in zip(views, getattr(step, name), strict=True):
                    view[:count] = values
        if choices is not None and not (choices.is_best and self._is_best):
            self._is_best = choices.is_best
            for name, view, padding in self._choices:
                view[count:] = padding
                view[:count] = getattr(choices, name)
