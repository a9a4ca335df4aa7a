"""A step's inputs as one run of bytes, so that a single copy brings them to the device; and steps padded to buckets.

A bucket of decodes is a shape: a number of requests from `request_buckets`, and block tables with a power of two
columns. Padding requests are decodes of token 0 at position 0 in a scratch block that no real request uses. They read
and write only that block and a scratch slot of states, and their logits follow those of the real requests.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from llmc.program import (
    ADAPTERS,
    CHOICE_INPUTS,
    GROUP_INPUTS,
    HIDDEN,
    ITEMSIZES,
    ROW_ADAPTERS,
    STATE_SLOTS,
    STEP_INPUTS,
    Limits,
    group_input,
)
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.sampling.row_choice import RowChoices

ALIGNMENT = 64
_LEAST_COLUMNS = 64


@dataclass(frozen=True)
class StepShape:
    """The counts of a step, which its grids, addresses and input layout follow from. hidden: columns of its hidden
    states. adapters: whether it says which adapter tokens have. states: whether it says where requests' states are.
    groups: of caches behind the first."""

    tokens: int
    logit_rows: int
    requests: int
    max_blocks: int
    hidden: int = 0
    adapters: bool = False
    states: bool = False
    groups: int = 0

    @staticmethod
    def of(step: Step) -> "StepShape":
        return StepShape(
            len(step.input_ids),
            len(step.logit_rows),
            len(step.context_lens),
            int(step.block_tables.shape[1]),
            0 if step.hidden is None else step.hidden.shape[1],
            step.adapter_of_token is not None,
            step.state_slots is not None,
            0 if step.group_tables is None else len(step.group_tables),
        )

    def counts(self) -> Mapping[str, int]:
        """By the names that launches use."""
        return {"T": self.tokens, "L": self.logit_rows, "R": self.requests, "max_blocks": self.max_blocks}

    def input_offsets(self) -> Mapping[str, int]:
        """At which byte each input starts, multiples of ALIGNMENT; `end` is the size of all."""
        return _input_offsets(self)


@functools.lru_cache(maxsize=256)
def _input_offsets(shape: StepShape) -> Mapping[str, int]:
    """Asked for by every launch of a step."""
    lengths = {
        "input_ids": shape.tokens,
        "positions": shape.tokens,
        "slot_mapping": shape.tokens,
        "query_starts": shape.requests + 1,
        "context_lens": shape.requests,
        "block_tables": shape.requests * shape.max_blocks,
        "logit_rows": shape.logit_rows,
        "tree_masks": shape.tokens,
        HIDDEN: shape.tokens * shape.hidden,
        ADAPTERS: shape.tokens if shape.adapters else 0,
        ROW_ADAPTERS: shape.logit_rows if shape.adapters else 0,
        STATE_SLOTS: shape.requests if shape.states else 0,
    }
    lengths |= {group_input(name, 1 + group): lengths[name] for group in range(shape.groups) for name in GROUP_INPUTS}
    lengths |= dict.fromkeys(CHOICE_INPUTS, shape.logit_rows)
    offsets, end, dtypes = {}, 0, STEP_INPUTS | CHOICE_INPUTS
    for name, length in lengths.items():
        offsets[name] = end
        end += -(-length * ITEMSIZES[dtypes.get(name, "I32")] // ALIGNMENT) * ALIGNMENT
    return MappingProxyType({**offsets, "end": end})


def largest_shape(
    limits: Limits, hidden: int = 0, *, adapters: bool = False, states: bool = False, groups: int = 0
) -> StepShape:
    """The shape of the largest step; columns of the block tables up to the next power of two."""
    columns = 1 << (max(_LEAST_COLUMNS, limits.blocks_for(limits.max_model_len)) - 1).bit_length()
    counts = limits.max_batch_tokens, limits.max_logit_rows, limits.max_sequences
    return StepShape(*counts, columns, hidden, adapters, states, groups)


def pack_inputs(step: Step, shape: StepShape, into: npt.NDArray[np.uint8], choices: RowChoices | None = None) -> int:
    """Write the inputs at the shape's offsets of `into`; returns how many bytes that takes.

    choices: for a step that is to choose; they come last, so that others leave their bytes as they are.
    """
    offsets = shape.input_offsets()
    given: dict[str, npt.NDArray[np.generic]] = dict(step.inputs())
    if choices is not None:
        given |= choices.arrays()
    for name, values in given.items():
        start = offsets[name]
        into[start : start + values.nbytes].view(values.dtype)[:] = values.reshape(-1)
    return offsets["end"] if choices is not None else offsets[next(iter(CHOICE_INPUTS))]


def request_buckets(limits: Limits) -> tuple[int, ...]:
    """Request counts that graphs are made for: 1, 2, 4, 8, then eighths of a power of two, up to the limits."""
    most = min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows)
    sizes = {most}
    size = 1
    while size < most:
        sizes.add(size)
        size += max(1, 1 << max(0, size.bit_length() - 4)) if size >= 8 else size
    return tuple(sorted(sizes))


def decode_bucket(step: Step, limits: Limits) -> StepShape | None:
    """The smallest bucket that holds a step in which each request has one token and wants its logits, else None."""
    shape = StepShape.of(step)
    if not shape.tokens == shape.requests == shape.logit_rows:
        return None
    requests = next(size for size in request_buckets(limits) if size >= shape.requests)
    columns = max(_LEAST_COLUMNS, 1 << (shape.max_blocks - 1).bit_length())
    return replace(shape, tokens=requests, logit_rows=requests, requests=requests, max_blocks=columns)


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


def example_step(shape: StepShape, limits: Limits, blocks: int) -> Step:
    """A step of that shape whose requests share its tokens evenly and have max_model_len of context each.

    Their blocks are spread over the cache and may coincide: for measuring only.
    """
    starts = np.linspace(0, shape.tokens, shape.requests + 1).astype(np.int32)
    tables = np.arange(shape.requests * shape.max_blocks, dtype=np.int32).reshape(shape.requests, -1) % blocks
    owners = np.repeat(np.arange(shape.requests), np.diff(starts))
    positions = (limits.max_model_len - (starts[1:][owners] - np.arange(shape.tokens))).astype(np.int32)
    slots = tables[owners, positions // limits.block_size] * limits.block_size + positions % limits.block_size
    return Step(
        input_ids=np.zeros(shape.tokens, np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=starts,
        context_lens=np.full(shape.requests, limits.max_model_len, np.int32),
        block_tables=tables,
        logit_rows=np.arange(shape.tokens - shape.logit_rows, shape.tokens, dtype=np.int32),
        tree_masks=np.zeros(shape.tokens, np.int64),
        hidden=np.zeros((shape.tokens, shape.hidden), np.float32) if shape.hidden else None,
        adapter_of_token=np.zeros(shape.tokens, np.int32) if shape.adapters else None,
        adapter_of_logit_row=np.zeros(shape.logit_rows, np.int32) if shape.adapters else None,
        state_slots=np.arange(shape.requests, dtype=np.int32) if shape.states else None,
    ).for_groups([blocks] * shape.groups)


def _each(known: Ints | None, padded: Callable[[Ints, int], Ints]) -> Ints | None:
    """Pad the arrays of cache groups 1 and up."""
    return None if known is None else np.stack([padded(own, group) for group, own in enumerate(known, 1)])


def _extended(values: Ints, extra: int, fill: int) -> Ints:
    return np.concatenate([values, np.full(extra, fill, np.int32)])
