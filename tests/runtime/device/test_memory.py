"""The GPU's memory: what is planned, and what is said when it does not suffice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmc.errors import OptionError
from llmc.program import StateSlot
from llmc.runtime.device.memory import RESERVED_BYTES, out_of_memory, plan_device_memory
from tests.runtime.device.device_program import LIMITS, program

GB = 10**9
PER_SEQUENCE = LIMITS.max_model_len // LIMITS.block_size
BLOCK_BYTES = 2 * 2 * 64 * 16 * 2


def test_the_cache_is_as_large_as_every_sequence_needs_and_no_larger() -> None:
    memory = plan_device_memory(program(), 80 * GB, None)
    assert memory.blocks == LIMITS.max_sequences * PER_SEQUENCE
    assert memory.block == BLOCK_BYTES
    assert memory.cache == (memory.blocks + 1) * BLOCK_BYTES
    assert memory.arena == 4096 + 256 * 512 + 8 * 32
    assert memory.logits == 32 * 1000 * 4


def test_the_cache_takes_what_is_left() -> None:
    fixed = plan_device_memory(program(), 80 * GB, None)
    others = fixed.weights + fixed.arena + fixed.logits + fixed.inputs + RESERVED_BYTES
    memory = plan_device_memory(program(), others + 1001 * BLOCK_BYTES, None)
    assert memory.blocks == 1000
    assert plan_device_memory(program(), 80 * GB, 500 * BLOCK_BYTES).blocks == 500


def test_too_little_memory_is_refused_with_the_sum() -> None:
    with pytest.raises(
        OptionError, match=r"max_model_len=4096 .* weights .* arena .* KV cache .* the GPU has"
    ) as error:
        plan_device_memory(program(), RESERVED_BYTES, None)
    assert "max_batch_tokens" in str(error.value.fix)
    with pytest.raises(OptionError, match="kv_cache_bytes=1"):
        plan_device_memory(program(), 80 * GB, 1)


def test_states_have_a_slot_for_each_sequence_and_one_for_padding() -> None:
    stateless = plan_device_memory(program(), 80 * GB, None)
    states = StateSlot((4, 1000)), StateSlot((8, 2, 500))
    memory = plan_device_memory(replace(program(), states=states), 80 * GB, None)
    assert memory.states == (LIMITS.max_sequences + 1) * 4 * (4 * 1000 + 8 * 2 * 500)
    # And 24 requests' slots among a step's inputs.
    assert memory.fixed == stateless.fixed + memory.states + 128
    assert " + states 1.20 MB + KV cache " in memory.arithmetic()


def test_out_of_memory_names_who_asked_and_what_to_lower() -> None:
    error = out_of_memory("layer 3's KV cache", "asked for 2.000 GB", GB, 80 * GB, "weights 16.00 GB + …")
    assert "layer 3's KV cache asked for 2.000 GB, 1.000 of 80.000 GB are free" in error.problem
    assert "kv_cache_bytes" in str(error.fix)
