"""Steps with prompts in their buckets: what is written of the step, and of the padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.program import group_input
from llmc.runtime.device.inputs import StepShape, largest_shape
from llmc.runtime.device.prompt_inputs import PromptInputs, PromptSizes
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices
from tests.runtime.device.device_program import LIMITS

SIZES = PromptSizes((8, 16, 64, 128, 512), (0, 1, 2, 4, 8, 16, 32), (2, 4, 8, 16, 24))
SCRATCH, SLOT = (9999, 77, 55), 24
DRAWN = RowChoice(0.5, 7, 0.9, 0.1, -3, 2)


def mixed(counts: list[int], rows: int, *, groups: int = 0) -> Step:
    """Requests with these numbers of tokens, after 20 earlier ones each; the last `rows` tokens need logits."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens, requests, size = int(starts[-1]), len(counts), LIMITS.block_size
    lens = np.array(counts, np.int32) + 20
    tables = np.arange(requests * -(-int(lens.max()) // size), dtype=np.int32).reshape(requests, -1)
    numbers = np.arange(1, 1 + tokens, dtype=np.int32)
    step = Step(
        input_ids=numbers,
        positions=numbers + 1,
        slot_mapping=numbers + 2,
        query_starts=starts,
        context_lens=lens,
        block_tables=tables,
        logit_rows=np.arange(tokens - rows, tokens, dtype=np.int32),
        tree_masks=numbers.astype(np.int64) << 33,
        hidden=np.outer(numbers, np.ones(8)).astype(np.float32),
        adapter_of_token=numbers % 3,
        adapter_of_logit_row=np.ones(rows, np.int32),
        state_slots=np.arange(requests, dtype=np.int32)[::-1].copy(),
    )
    if not groups:
        return step
    of = range(1, 1 + groups)
    return replace(
        step,
        group_slots=np.stack([step.slot_mapping + 1000 * g for g in of]),
        group_tables=np.stack([tables + 1000 * g for g in of]),
        group_lens=np.stack([lens - g for g in of]),
    )


def written(step: Step, choices: RowChoices | None, sizes: PromptSizes = SIZES) -> tuple[StepShape | None, np.ndarray]:
    largest = largest_shape(LIMITS, 8, adapters=True, states=True, groups=2)
    memory = np.full(largest.input_bytes(chooses=True), 0xEE, np.uint8)
    groups = 0 if step.group_tables is None else len(step.group_tables)
    return PromptInputs(LIMITS, sizes, memory, SCRATCH[: 1 + groups], SLOT).write(step, choices), memory


@pytest.mark.parametrize("groups", [0, 2])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 12), st.booleans())
def test_a_bucket_has_the_step_and_requests_of_scratch_memory(
    groups: int, counts: list[int], wanted: int, has_choices: bool
) -> None:
    rows = min(wanted, sum(counts))
    step = mixed(counts, rows, groups=groups)
    shape, memory = written(step, RowChoices.of([DRAWN] * rows) if has_choices else None)
    if shape is None:
        assert sum(counts) < 3 * len(counts) and (memory == 0xEE).all()
        return
    tokens, requests = len(step.input_ids), len(counts)
    assert tokens <= shape.tokens <= 512 and shape.requests < shape.tokens
    assert rows <= shape.logit_rows and (shape.logit_rows > 0) == (rows > 0)

    def read(name: str, count: int, dtype: type = np.int32) -> np.ndarray:
        start = shape.input_offsets()[name]
        return memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    for base, group, values in step.inputs_by_group():
        name = group_input(base, group)
        if base == "block_tables":
            table = read(name, shape.requests * shape.max_blocks).reshape(shape.requests, -1)
            np.testing.assert_array_equal(table[:requests, : values.shape[1]], values)
            assert (table[requests:] == SCRATCH[group]).all() and (table[:, values.shape[1] :] == SCRATCH[group]).all()
        else:
            kept = read(name, values.size, values.dtype.type)
            np.testing.assert_array_equal(kept, values.reshape(-1))
    extra = shape.tokens - tokens
    starts = read("query_starts", shape.requests + 1)
    assert starts[requests] == tokens and (starts[requests + 1 :] == shape.tokens).all()
    assert starts[-1] == shape.tokens or not extra
    for group in range(1 + groups):
        slots = read(group_input("slot_mapping", group), shape.tokens)[tokens:]
        assert (slots // LIMITS.block_size == SCRATCH[group]).all()
        lens = read(group_input("context_lens", group), shape.requests)[requests:].tolist()
        assert lens == ([extra] + [0] * (len(lens) - 1) if lens else [])
    for name in ("input_ids", "positions", "adapter_of_token"):
        assert not read(name, shape.tokens)[tokens:].any()
    assert not read("tree_masks", shape.tokens, np.int64)[tokens:].any()
    assert not read("hidden", 8 * shape.tokens, np.float32)[8 * tokens :].any()
    assert not read("logit_rows", shape.logit_rows)[rows:].any()
    assert (read("state_slots", shape.requests)[requests:] == SLOT).all()
    if has_choices:
        top_k = read("top_k", shape.logit_rows)
        assert (top_k[:rows] == DRAWN.top_k).all() and (top_k[rows:] == BEST.top_k).all()


@pytest.mark.parametrize(
    ("counts", "rows", "why"),
    [
        ([513], 1, "more tokens than the largest bucket"),
        ([20] + [1] * 23, 1, "padding needs one more request than there may be"),
        ([40], 33, "more logit rows than the largest bucket"),
        ([1] * 8, 7, "as many requests as tokens, as in decodes"),
    ],
)
def test_a_step_without_a_bucket_is_not_written(counts: list[int], rows: int, why: str) -> None:
    shape, memory = written(mixed(counts, rows), None)
    assert shape is None, why
    assert (memory == 0xEE).all()


def test_padding_that_its_table_cannot_hold_has_no_bucket() -> None:
    sizes = replace(SIZES, tokens=(8, 4096))
    assert written(mixed([9], 1), None, sizes)[0] is None


def test_a_full_bucket_needs_no_request_of_padding() -> None:
    shape, _ = written(mixed([41, *[1] * 23], 24), None)
    assert shape is not None and (shape.tokens, shape.requests, shape.logit_rows) == (64, 24, 32)
