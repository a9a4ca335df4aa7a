"""The buckets that graphs are made for, and what their padding leaves unchanged: the bytes in memory are those of a
padded step, whatever was there before."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.program import Limits
from llmc.runtime.device.decode_inputs import DecodeInputs, request_buckets
from llmc.runtime.device.inputs import StepShape, largest_shape, pack_inputs
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices
from tests.runtime.device.decode_step import decodes
from tests.runtime.device.device_program import LIMITS
from tests.runtime.device.padded_step import padded

SCRATCH_BLOCKS, SCRATCH_SLOT = (9999, 77, 55), 24
DRAWN = RowChoice(0.5, 7, 0.9, 0.1, -3, 2)


def inputs_of(scratch_blocks: tuple[int, ...] = SCRATCH_BLOCKS[:1]) -> tuple[DecodeInputs, np.ndarray]:
    largest = largest_shape(LIMITS, 8, adapters=True, states=True, groups=2)
    memory = np.full(largest.input_bytes(chooses=True), 0xEE, np.uint8)
    return DecodeInputs(LIMITS, memory, scratch_blocks, SCRATCH_SLOT), memory


def check(inputs: DecodeInputs, memory: np.ndarray, step: Step, choices: RowChoices | None) -> StepShape:
    """Write the step, and compare what is there with the padded step, packed."""
    shape = inputs.write(step, choices)
    assert shape is not None
    groups = 0 if step.group_tables is None else len(step.group_tables)
    full = padded(step, shape, LIMITS.block_size, SCRATCH_BLOCKS[: 1 + groups], SCRATCH_SLOT)
    assert StepShape.of(full) == shape
    nbytes = shape.input_bytes(chooses=choices is not None)
    wanted = memory[:nbytes].copy()
    pack_inputs(full, shape, wanted)
    if choices is not None:
        rest = [BEST] * (shape.requests - len(choices.seeds))
        more = RowChoices.of(rest).arrays()
        arrays: dict[str, Any] = {name: np.concatenate([own, more[name]]) for name, own in choices.arrays().items()}
        pack_inputs(full, shape, wanted, RowChoices(**arrays))
    assert np.array_equal(memory[:nbytes], wanted)
    return shape


def of_all_kinds(step: Step, kind: str) -> Step:
    """With more inputs, different in each request."""
    count = len(step.context_lens)
    numbers = np.arange(1, 1 + count, dtype=np.int32)
    if kind == "adapters":
        return replace(step, adapter_of_token=numbers % 3, adapter_of_logit_row=numbers % 3)
    if kind == "states":
        return replace(step, state_slots=numbers[::-1].copy())
    if kind == "hidden":
        return replace(step, hidden=np.outer(numbers, np.ones(8)).astype(np.float32))
    if kind == "groups":
        tables = np.stack([step.block_tables + 1, step.block_tables + 2])
        slots = np.stack([step.slot_mapping + 3, step.slot_mapping + 4])
        return replace(step, group_slots=slots, group_tables=tables, group_lens=np.stack([numbers, numbers + 1]))
    return step


contexts = st.lists(st.integers(1, LIMITS.max_model_len), min_size=1, max_size=LIMITS.max_sequences)
kinds = ["plain", "adapters", "states", "hidden", "groups"]


@pytest.mark.parametrize("kind", kinds)
@given(steps=st.lists(st.tuples(contexts, st.sampled_from(["none", "best", "drawn"]), st.booleans()), max_size=8))
def test_memory_has_the_padded_step_whatever_came_before(kind: str, steps: list[tuple[list[int], str, bool]]) -> None:
    inputs, memory = inputs_of(SCRATCH_BLOCKS if kind == "groups" else SCRATCH_BLOCKS[:1])
    for lengths, chosen, is_lost in steps:
        rows = [BEST if chosen == "best" or index % 2 else DRAWN for index in range(len(lengths))]
        if is_lost:
            memory[:] = 0xDD
            inputs.lose()
        check(inputs, memory, of_all_kinds(decodes(lengths), kind), None if chosen == "none" else RowChoices.of(rows))


@pytest.mark.parametrize("count", [1, 3, 24])
def test_decodes_that_go_on_write_their_own_rows_only(count: int) -> None:
    inputs, memory = inputs_of()
    best = RowChoices.of([BEST] * count)
    shape = check(inputs, memory, decodes([40] * count), best)
    start = shape.input_offsets()
    memory[start["query_starts"] : start["context_lens"]] = 0xAA
    memory[start["temperature"] : start["end"]] = 0xAA
    assert inputs.write(decodes([41] * count), best) is shape
    inputs.write(decodes([42] * count), RowChoices.of([DRAWN] * count))
    assert (memory[start["query_starts"] : start["context_lens"]] == 0xAA).all()
    assert not (memory[start["temperature"] : start["top_k"]] == 0xAA).all()


def test_a_step_with_a_prompt_or_without_logits_has_no_bucket() -> None:
    inputs, memory = inputs_of()
    step = decodes([5, 9])
    prompt = Step(**{**vars(step), "context_lens": step.context_lens[:1], "block_tables": step.block_tables[:1]})
    silent = Step(**{**vars(step), "logit_rows": step.logit_rows[:1]})
    assert inputs.write(prompt, None) is None
    assert inputs.write(silent, None) is None
    assert (memory == 0xEE).all()
    assert inputs.write(step, None) == StepShape(2, 2, 2, 64)


def test_every_bucket_fits_the_room_of_the_largest_step() -> None:
    inputs, memory = inputs_of()
    for count in range(1, LIMITS.max_sequences + 1):
        shape = inputs.write(decodes([LIMITS.max_model_len] * count), None)
        assert shape is not None
        assert shape.input_bytes(chooses=True) <= largest_shape(LIMITS).input_bytes(chooses=True) <= memory.nbytes


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 700))
def test_buckets_grow_to_the_limit_with_little_padding(sequences: int, tokens: int, rows: int) -> None:
    buckets = request_buckets(Limits(tokens, sequences, rows, 64, 16))
    assert buckets[0] == 1
    assert buckets[-1] == min(sequences, tokens, rows)
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger <= smaller * 1.25 or larger <= 8


@pytest.mark.parametrize("contexts", [[1], [5, 40, 17], [1030, 2, 3, 4, 5]])
def test_padding_keeps_the_real_requests_and_touches_only_the_scratch_block(contexts: list[int]) -> None:
    inputs, memory = inputs_of()
    step, count, scratch = decodes(contexts), len(contexts), SCRATCH_BLOCKS[0]
    shape = check(inputs, memory, step, None)

    def read(name: str, length: int) -> np.ndarray:
        start = shape.input_offsets()[name]
        return memory[start : start + 4 * length].view(np.int32)

    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logit_rows"):
        np.testing.assert_array_equal(read(name, count), getattr(step, name))
    tables = read("block_tables", shape.requests * shape.max_blocks).reshape(shape.requests, -1)
    np.testing.assert_array_equal(tables[:count, : step.block_tables.shape[1]], step.block_tables)
    assert (tables[count:] == scratch).all()
    assert set(read("slot_mapping", shape.requests)[count:].tolist()) <= {scratch * 16}
    assert set(read("context_lens", shape.requests)[count:].tolist()) <= {1}
    assert read("query_starts", shape.requests + 1).tolist() == list(range(shape.requests + 1))
