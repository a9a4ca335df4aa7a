"""Decodes padded to a bucket as a step of its own: what DecodeInputs writes, array by array."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmc.runtime.device.inputs import StepShape
from llmc.runtime.loop.step import Ints, Step


def padded(step: Step, shape: StepShape, block_size: int, scratch_blocks: Sequence[int], scratch_slot: int = 0) -> Step:
    """A step of decodes filled up to a bucket's shape. scratch_blocks: of each group of caches. scratch_slot: of
    states, where the model has some."""
    count, extra = len(step.context_lens), shape.requests - len(step.context_lens)

    def table(known: Ints, group: int) -> Ints:
        whole = np.full((shape.requests, shape.max_blocks), scratch_blocks[group], np.int32)
        whole[:count, : known.shape[1]] = known
        return whole

    def slots(known: Ints, group: int) -> Ints:
        return _extended(known, extra, scratch_blocks[group] * block_size)

    def lens(known: Ints, group: int) -> Ints:
        return _extended(known, extra, 1)

    every = np.arange(shape.requests + 1, dtype=np.int32)
    return Step(
        input_ids=_extended(step.input_ids, extra, 0),
        positions=_extended(step.positions, extra, 0),
        slot_mapping=slots(step.slot_mapping, 0),
        query_starts=every,
        context_lens=lens(step.context_lens, 0),
        block_tables=table(step.block_tables, 0),
        logit_rows=np.concatenate([step.logit_rows, every[count : shape.requests]]),
        tree_masks=np.zeros(shape.requests, np.int64),
        sides=step.sides,
        hidden=None if step.hidden is None else np.pad(step.hidden, ((0, extra), (0, 0))),
        adapter_of_token=None if step.adapter_of_token is None else _extended(step.adapter_of_token, extra, 0),
        adapter_of_logit_row=(
            None if step.adapter_of_logit_row is None else _extended(step.adapter_of_logit_row, extra, 0)
        ),
        state_slots=None if step.state_slots is None else _extended(step.state_slots, extra, scratch_slot),
        group_slots=_each(step.group_slots, slots),
        group_tables=_each(step.group_tables, table),
        group_lens=_each(step.group_lens, lens),
    )


def _each(known: Ints | None, padded: Callable[[Ints, int], Ints]) -> Ints | None:
    """Pad the arrays of cache groups 1 and up."""
    return None if known is None else np.stack([padded(own, group) for group, own in enumerate(known, 1)])


def _extended(values: Ints, extra: int, fill: int) -> Ints:
    return np.concatenate([values, np.full(extra, fill, np.int32)])
