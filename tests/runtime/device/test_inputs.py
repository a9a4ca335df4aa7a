"""Packing a step for one copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmc.runtime.device.inputs import ALIGNMENT, StepShape, largest_shape, pack_inputs
from llmc.runtime.sampling.row_choice import RowChoice, RowChoices
from tests.runtime.device.decode_step import decodes
from tests.runtime.device.device_program import LIMITS


def test_packed_inputs_are_read_back_at_their_offsets() -> None:
    step = decodes([5, 40, 17])
    shape = StepShape.of(step)
    memory = np.full(shape.input_offsets()["end"], 0xEE, np.uint8)
    choices = RowChoices.of([RowChoice(0.5, 7, 0.9, 0.1, -3, i) for i in range(3)])
    pack_inputs(step, shape, memory, choices)
    assert shape.input_bytes(chooses=True) == memory.nbytes
    assert shape.input_bytes(chooses=False) == shape.input_offsets()["temperature"]
    for name, offset in shape.input_offsets().items():
        assert offset % ALIGNMENT == 0
        if name in {**dict(step.arrays()), **vars(choices)}:
            values = getattr(choices if hasattr(choices, name) else step, name)
            array = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
            np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize(("tokens", "columns"), [(16 * 64, 64), (16 * 64 + 1, 128), (16 * 128, 128)])
def test_tables_have_columns_up_to_the_next_power_of_two(tokens: int, columns: int) -> None:
    assert largest_shape(replace(LIMITS, max_model_len=tokens, block_size=16)).max_blocks == columns
