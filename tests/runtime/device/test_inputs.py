"""Packing a step for one copy, the buckets that graphs are made for, and what padding a step leaves unchanged."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.program import ADAPTERS, ROW_ADAPTERS, STATE_SLOTS, Limits
from llmc.runtime.device.inputs import (
    ALIGNMENT,
    StepShape,
    decode_bucket,
    largest_shape,
    pack_inputs,
    padded,
    request_buckets,
)
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import RowChoice, RowChoices
from tests.runtime.device.decode_step import decodes
from tests.runtime.device.device_program import LIMITS


def test_packed_inputs_are_read_back_at_their_offsets() -> None:
    step = decodes([5, 40, 17])
    shape = StepShape.of(step)
    memory = np.full(shape.input_offsets()["end"], 0xEE, np.uint8)
    choices = RowChoices.of([RowChoice(0.5, 7, 0.9, 0.1, -3, i) for i in range(3)])
    assert pack_inputs(step, shape, memory, choices) == memory.nbytes
    assert pack_inputs(step, shape, memory) == shape.input_offsets()["temperature"]
    for name, offset in shape.input_offsets().items():
        assert offset % ALIGNMENT == 0
        if name in {**dict(step.arrays()), **vars(choices)}:
            values = getattr(choices if hasattr(choices, name) else step, name)
            found = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
            np.testing.assert_array_equal(found, values)


def test_every_bucket_fits_the_room_of_the_largest_step() -> None:
    room = largest_shape(LIMITS).input_offsets()["end"]
    for count in range(1, LIMITS.max_sequences + 1):
        shape = decode_bucket(decodes([LIMITS.max_model_len] * count), LIMITS)
        assert shape is not None
        assert shape.input_offsets()["end"] <= room


@pytest.mark.parametrize(("tokens", "columns"), [(16 * 64, 64), (16 * 64 + 1, 128), (16 * 128, 128)])
def test_tables_have_columns_up_to_the_next_power_of_two(tokens: int, columns: int) -> None:
    assert largest_shape(replace(LIMITS, max_model_len=tokens, block_size=16)).max_blocks == columns


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 700))
def test_buckets_grow_to_the_limit_with_little_padding(sequences: int, tokens: int, rows: int) -> None:
    buckets = request_buckets(Limits(tokens, sequences, rows, 64, 16))
    assert buckets[0] == 1
    assert buckets[-1] == min(sequences, tokens, rows)
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger <= smaller * 1.25 or larger <= 8


def test_padding_has_no_adapter() -> None:
    of = np.array([2, 0, 1], np.int32)
    step = replace(decodes([5, 40, 17]), adapter_of_token=of, adapter_of_logit_row=of)
    shape = decode_bucket(step, LIMITS)
    assert shape is not None and shape.adapters and shape.requests == 4
    full = padded(step, shape, 16, (9999,))
    memory = np.full(shape.input_offsets()["end"], 0xEE, np.uint8)
    pack_inputs(full, shape, memory)
    for name in (ADAPTERS, ROW_ADAPTERS):
        offset = shape.input_offsets()[name]
        assert memory[offset : offset + 16].view(np.int32).tolist() == [2, 0, 1, 0]


def test_padding_has_a_slot_of_states_of_its_own() -> None:
    step = replace(decodes([5, 40, 17]), state_slots=np.array([2, 0, 1], np.int32))
    shape = decode_bucket(step, LIMITS)
    assert shape is not None and shape.states and shape.requests == 4
    full = padded(step, shape, 16, (9999,), scratch_slot=8)
    assert StepShape.of(full) == shape
    memory = np.full(shape.input_offsets()["end"], 0xEE, np.uint8)
    pack_inputs(full, shape, memory)
    offset = shape.input_offsets()[STATE_SLOTS]
    assert memory[offset : offset + 16].view(np.int32).tolist() == [2, 0, 1, 8]
    assert full.context_lens[3] == 1  # The first of its sequence: nothing is read of the slot.


def test_a_step_with_a_prompt_or_without_logits_has_no_bucket() -> None:
    step = decodes([5, 9])
    assert decode_bucket(step, LIMITS) == StepShape(2, 2, 2, 64)
    prompt = Step(**{**vars(step), "context_lens": step.context_lens[:1], "block_tables": step.block_tables[:1]})
    silent = Step(**{**vars(step), "logit_rows": step.logit_rows[:1]})
    assert decode_bucket(prompt, LIMITS) is None
    assert decode_bucket(silent, LIMITS) is None


@pytest.mark.parametrize("contexts", [[1], [5, 40, 17], [1030, 2, 3, 4, 5]])
def test_padding_keeps_the_real_requests_and_touches_only_the_scratch_block(contexts: list[int]) -> None:
    step = decodes(contexts)
    shape = decode_bucket(step, LIMITS)
    assert shape is not None
    full, count, scratch = padded(step, shape, 16, (9999,)), len(contexts), 9999
    assert StepShape.of(full) == shape
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logit_rows"):
        np.testing.assert_array_equal(getattr(full, name)[:count], getattr(step, name))
    np.testing.assert_array_equal(full.block_tables[:count, : step.block_tables.shape[1]], step.block_tables)
    assert set(full.slot_mapping[count:].tolist()) <= {scratch * 16}
    assert set(full.context_lens[count:].tolist()) <= {1}
    assert (full.block_tables[count:] == scratch).all()
    assert full.query_starts.tolist() == list(range(shape.requests + 1))
