"""A step's inputs as one run of bytes, so that a single copy brings them to the device."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
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
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import RowChoices

ALIGNMENT = 64
# Block tables in a bucket of decodes have at least this many.
LEAST_COLUMNS = 64


@dataclass(frozen=True)
class StepShape:
    """The counts of a step, which its grids, addresses and input layout follow from. hidden: columns of its hidden
    states. adapters: whether it says which adapter tokens have. states: whether it says where requests' states are.
    groups: number of groups of caches after the first."""

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
        """The counts of the step, by the names that launches use."""
        return {"T": self.tokens, "L": self.logit_rows, "R": self.requests, "max_blocks": self.max_blocks}

    def input_offsets(self) -> Mapping[str, int]:
        """Return the byte at which each input starts, a multiple of ALIGNMENT; `end` is the size of all."""
        return _input_offsets(self)

    def input_bytes(self, *, chooses: bool) -> int:
        """The size of a step's inputs. chooses: including those of token choice, which come last."""
        return self.input_offsets()["end" if chooses else next(iter(CHOICE_INPUTS))]


# The shape of a step with a compaction, which has no tokens.
NO_STEP = StepShape(0, 0, 0, 0)


@functools.lru_cache(maxsize=256)
def _input_offsets(shape: StepShape) -> Mapping[str, int]:
    """Return the offsets of inputs, cached because every launch of a step needs them."""
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
    columns = 1 << (max(LEAST_COLUMNS, limits.blocks_for(limits.max_model_len)) - 1).bit_length()
    counts = limits.max_batch_tokens, limits.max_logit_rows, limits.max_sequences
    return StepShape(*counts, columns, hidden, adapters, states, groups)


def pack_inputs(step: Step, shape: StepShape, into: npt.NDArray[np.uint8], choices: RowChoices | None = None) -> None:
    """Write the inputs at the shape's offsets of `into`. choices: for a step that is to choose."""
    offsets = shape.input_offsets()
    inputs: dict[str, npt.NDArray[np.generic]] = dict(step.inputs())
    if choices is not None:
        inputs |= choices.arrays()
    for name, values in inputs.items():
        start = offsets[name]
        into[start : start + values.nbytes].view(values.dtype)[:] = values.reshape(-1)


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
